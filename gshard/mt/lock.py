"""One process at a time in a folder or file; the error of a second one names the first.

The operating system releases a lock when its process ends, however it ends, so that nothing has to
be cleaned up after a crash. A lock belongs to a file and not to its name: removing `.lock`
and creating another one would give a second lock on the same folder. So the folder itself is locked
too, and where a file system does not support that, as NFS, the holder checks its file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from gshard.mt import atomic
from gshard.mt.errors import UserError

LOCK, OWNER = ".lock", ".lock-owner.json"


def hold(path: Path) -> IO[bytes] | None:
    """The file at `path`, locked until it is closed; None if another process holds it."""
    while True:
        file = atomic.open_in_place(path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        if _has_name(file, path):
            return file
        file.close()  # it was renamed or removed after it had been opened


class HeldFolder:
    """A folder that this process holds."""

    def __init__(self, folder: Path, file: IO[bytes], doing: str):
        self._folder, self._file, self._doing = folder, file, doing

    def intruder(self) -> str:
        """A sentence about another process that has entered since `.lock` was removed, or ""."""
        if _has_name(self._file, self._folder / LOCK):
            return ""
        file = hold(self._folder / LOCK)
        if file is None:
            return (
                f"{self._folder / LOCK} was removed while this process held it, and now "
                f"{self._folder} is being {self._doing} by {_owner(self._folder)}; this one ends"
            )
        self._file.close()
        self._file = file
        return ""

    def close(self) -> None:
        """Release it."""
        self._file.close()


@contextlib.contextmanager
def locked(folder: Path, doing: str = "trained in") -> Iterator[HeldFolder]:
    """Lock `folder`, which is created if missing; an error if another process has it."""
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        file = hold(folder / LOCK)
        held = HeldFolder(folder, file, doing) if file else None
        if held:
            stack.callback(held.close)
        if held is None or not _hold_folder(folder, stack):
            raise UserError(f"{folder} is being {doing} by {_owner(folder)}")
        try:
            owner = {"host": socket.gethostname(), "process": os.getpid()}
            atomic.write_json(folder / OWNER, owner)
            yield held
        finally:
            (folder / OWNER).unlink(missing_ok=True)
            if made and [path.name for path in folder.iterdir()] == [LOCK]:  # nothing came of it
                (folder / LOCK).unlink()
                folder.rmdir()


def _hold_folder(folder: Path, stack: contextlib.ExitStack) -> bool:
    """Lock the folder itself, where the file system can; False if another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    stack.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # NFS locks what is open for writing
        if error.errno not in (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
    return True


def _has_name(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    except FileNotFoundError:
        return False


def _owner(folder: Path) -> str:
    try:
        owner = atomic.read_object(folder / OWNER)
        process, host = int(owner["process"]), str(owner["host"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return "another process"
    known = host.isprintable() and len(host) < 256
    return f"process {process} on {host}" if known else f"process {process}"
