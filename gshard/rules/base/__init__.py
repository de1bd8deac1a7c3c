"""Rules of operators, and the choice of the cheapest way to run one."""
