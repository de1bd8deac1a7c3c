"""Replays: the partitioned program in Python."""
