"""Annotations chosen by gshard: the search for a layout, and the solver behind it."""
