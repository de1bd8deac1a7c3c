"""Numbers whose addition is associative, and JAX's operators on them, for all devices at once."""
