"""What comes after a save that failed: Orbax has closed its event loop, and writes fail on."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

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
