"""Saves that fail: hosts hear of each other's, and what still comes of one is silenced.

Orbax's threads wait for each other twice in a save, when everything is written and when it has its
name, and once more at its end, which a save that has failed comes to at once. With Orbax's own
barriers the host that failed then waits at the end for the others, and they in the middle for it.
After a failure Orbax has closed its event loop, and writes fail on.
"""

from __future__ import annotations

import functools
import itertools
import logging
import sys
from collections.abc import Callable
from typing import Any

from gshard.mt import _jax, hosts

_UNHEARD = ("exception was never retrieved", "was destroyed but it is pending")  # asyncio's words


def silence_orbax_after_failure() -> None:
    """Silence writes that end after their save has failed and was reported.

    TensorStore and asyncio would show a traceback for each of them, thousands when the disk is
    full, since their event loop is closed.
    """
    sys.unraisablehook = functools.partial(_hook, sys.unraisablehook)
    logging.getLogger("asyncio").addFilter(_is_heard)


def _hook(shown: Callable[[Any], object], unraisable: Any) -> None:
    late = isinstance(unraisable.exc_value, RuntimeError)
    if not (late and str(unraisable.exc_value) == "Event loop is closed"):
        shown(unraisable)


def _is_heard(record: logging.LogRecord) -> bool:
    return not any(words in record.getMessage() for words in _UNHEARD)


_IN_A_SAVE = "async_"  # in the names of Orbax's barriers that a save which fails never comes to
_rounds = itertools.count()  # the same one on every host, since all wait in every round


class OtherHostError(Exception):
    """The save has failed on another host, which knows why."""


def wait(*, key: str, timeout_ms: int) -> None:
    """Return when all hosts are at the barrier `key`; an error if the save of one has failed."""
    client = _jax.coordination()
    while client is not None:
        number = next(_rounds)
        place = "middle" if _IN_A_SAVE in key else "end"
        client.key_value_set(_folder(number) + place, "", allow_overwrite=True)
        client.wait_at_barrier(f"gshard save {number}", timeout_ms)
        apart = len(client.key_value_dir_get(_folder(number))) > 1
        if hosts.is_first():  # all have read the round before
            client.key_value_delete(_folder(number - 1))
        if not apart:
            return
        if place == "middle":
            raise OtherHostError("the save of another host has failed")
        # The others come to the end too, now that they have heard of it.


def _folder(number: int) -> str:
    return f"gshard/save/{number}/"
