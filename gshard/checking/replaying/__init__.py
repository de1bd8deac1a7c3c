"""A partitioned program run in Python, equation by equation, for all devices in lockstep."""
