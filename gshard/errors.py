"""Errors that a user can fix: one line on the command line, with the closest known name."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from difflib import get_close_matches
from typing import TypeVar

T = TypeVar("T", bound=str)


class UserError(Exception):
    """Something in the user's input, files or machine is wrong; the message says what to do."""

    status = 1  # exit status of the command
    at_once = False  # exit without waiting for threads and processes


def nearest(name: str, known: Collection[str]) -> str:
    """`; did you mean ...?` for the known names that begin so, or the closest one, or nothing."""
    close = [k for k in known if k.startswith(name)][:3] or get_close_matches(name, known, 1, 0.5)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def one_of(what: str, given: str, allowed: Sequence[T]) -> T:
    """The allowed value that was given; an error that names all of them if it is none."""
    for value in allowed:
        if value == given:
            return value
    raise UserError(
        f"unknown {what} {given!r}{nearest(given, allowed)}; allowed are {', '.join(allowed)}"
    )
