"""Mutants of the partitioner: small mistakes that the quick tests have to notice."""
