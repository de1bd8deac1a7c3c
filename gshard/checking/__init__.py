"""Whether a partitioned program computes what the user's program says, value by value."""
