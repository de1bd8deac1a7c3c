"""The planner: how every operator runs, with communication as nodes."""
