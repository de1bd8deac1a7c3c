"""Errors that a user can fix: one line on the command line, with the closest known name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T", bound=str)


class UserError(Exception):
    """Something in the user's input, files or machine is wrong; the message says what to do."""

    status = 1  # exit status of the command
    at_once = False  # exit without waiting for threads and processes


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean ...?` for the known name closest to a misspelt one, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def one_of(what: str, given: str, allowed: Sequence[T]) -> T:
    """The allowed value that was given; an error that names all of them if it is none."""
    for value in allowed:
        if value == given:
            return value
    raise UserError(
        f"unknown {what} {given!r}{nearest(given, allowed)}; allowed are {', '.join(allowed)}"
    )
