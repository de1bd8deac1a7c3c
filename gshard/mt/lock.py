"""One training at a time in a run's folder; a second one is told who is there.

The operating system gives the lock back when its process ends, however it ends, so that nothing has
to be cleaned up after a crash.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import filelock

from gshard.mt import atomic
from gshard.mt.errors import UserError

LOCK, OWNER = ".lock", ".lock-owner.json"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold `folder`, which is made if it is not there; an error if somebody else holds it."""
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise UserError(f"{folder} is being trained in by {_owner(folder)}") from None
    try:
        owner = {"host": socket.gethostname(), "process": os.getpid()}
        atomic.write_json(folder / OWNER, owner)
        yield
    finally:
        (folder / OWNER).unlink(missing_ok=True)
        if made and [path.name for path in folder.iterdir()] == [LOCK]:  # nothing came of it
            (folder / LOCK).unlink()
            folder.rmdir()
        lock.release()


def _owner(folder: Path) -> str:
    try:
        owner = json.loads((folder / OWNER).read_text(encoding="utf-8"))
        return f"process {owner['process']} on {owner['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
