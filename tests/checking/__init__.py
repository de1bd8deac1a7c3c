"""Checks: partitioned and unpartitioned, value by value."""
