"""A sharding for every value, from a few annotations."""
