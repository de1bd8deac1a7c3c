"""Python's garbage collector while a program is traced and lowered."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def new_objects_only() -> Iterator[None]:
    """The collector looks through what was made inside, and not through what was there before.

    Tracing makes so many objects that a full collection runs several times; each would look through
    everything that JAX and the user hold, a fifth of the time of a lowering. Garbage from before is
    collected afterwards. Where some objects are frozen already, by the user or by a lowering in
    another thread, nothing is changed.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
