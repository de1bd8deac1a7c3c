"""What a user can mend: a message in the user's words, printed without a traceback."""

from __future__ import annotations

from gshard.errors import UserError, nearest, one_of

__all__ = ["MissingHostsError", "NobodyCameError", "UserError", "nearest", "one_of"]


class MissingHostsError(UserError):
    """Other processes of the run are not there; they may be when it is tried again."""

    status = 75  # "temporary failure" of sysexits.h


class NobodyCameError(MissingHostsError):
    """The same, while JAX still waits for them in a thread that cannot be ended."""

    at_once = True
