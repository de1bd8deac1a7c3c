"""What a partitioned program will take on hardware that need not be there: memory and time."""
