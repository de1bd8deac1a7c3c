"""Commands for those who work on gshard; no part of the package."""
