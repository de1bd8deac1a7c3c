"""The subcommands of `gshard`: a module for each.

None imports anything heavy at its top, so that `--help` answers soon, and none imports a package of
the extra `mt` before it is run: those that need it say so.
"""
