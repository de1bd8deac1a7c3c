"""The subcommands of `gshard`: a module for each.

No module imports anything heavy at its top, so that `--help` is quick, and none imports a package
of the extra `mt` before its command runs.
"""
