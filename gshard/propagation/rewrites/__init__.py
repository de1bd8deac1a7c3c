"""Rewrites that depend on shardings: patterns that are cheaper in another form."""
