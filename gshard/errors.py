"""Mistakes that a user can mend: one line on the command line, and the nearest name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something in the user's input, files or machine is wrong; the message says what to do."""

    status = 1  # that the command exits with
    at_once = False  # whether to exit without waiting for anything that still runs


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean ...?` for the known name closest to a misspelt one, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
