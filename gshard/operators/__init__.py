"""What gshard knows about operators: rules, and how the cheapest way to run one is chosen."""
