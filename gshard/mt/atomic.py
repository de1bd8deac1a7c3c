"""Files and folders that are written atomically, and held by one process at a time.

What is new is written under a temporary name, then renamed. A gathering may be killed at any moment
or fill the disk; what a later run finds under its final name is complete, and everything under a
temporary name can be deleted. What is read may have been damaged or replaced: only regular files
are read and replaced.

The error of a second process that wants a folder names the first. The operating system releases a
lock when its process ends, however it ends, so that nothing has to be cleaned up after a crash. A
lock belongs to a file and not to its name: removing `.lock` and creating another one would give a
second lock on the same folder. So the folder itself is locked too, and where a file system does not
support that, as NFS, the holder checks its file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from gshard.errors import UserError
from gshard.untrusted import printable as printable
from gshard.untrusted import read_object as read_object
from gshard.untrusted import read_text as read_text
from gshard.untrusted import refuse_special as refuse_special

PREFIX = ".part-"  # of what is not complete yet
_LINK = "is a link to another file, which would be overwritten"


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A temporary path in the same folder that becomes `path` when the block ends well."""
    if path.exists():
        refuse_special(path)  # /dev/null, say, is not to be replaced by a file
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=PREFIX, suffix=path.suffix, dir=path.parent)
    os.close(handle)
    part = Path(name)
    try:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.chmod(0o644)  # mkstemp makes a private file; a corpus is shared like any other
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder that becomes `path`, in place of an old one, when the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=PREFIX, dir=path.parent))
    try:
        yield part
        part.chmod(0o755)
        put_folder(part, path)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def put_folder(part: Path, path: Path) -> None:
    """Give the folder `part` the name `path`; whatever has that name is removed.

    A link is removed and not followed, and another process may do the same at the same time.
    """
    while True:
        try:
            part.replace(path)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        with (
            tempfile.TemporaryDirectory(
                prefix=PREFIX, dir=path.parent, ignore_cleanup_errors=True
            ) as old,
            contextlib.suppress(FileNotFoundError),
        ):
            path.rename(Path(old) / "old")


def open_in_place(path: Path) -> IO[bytes]:
    """A file that is changed where it is, made if it is absent; unbuffered.

    A link is rejected: it could make another file be written to.
    """
    with contextlib.suppress(FileNotFoundError):
        refuse_special(path)  # before a device is opened
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        file = os.fdopen(os.open(path, flags, 0o644), "r+b", buffering=0)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, _LINK, str(path)) from None
        raise
    found = os.fstat(file.fileno())
    if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1:  # 0: removed just now
        return file
    file.close()
    raise OSError(errno.ELOOP, _LINK, str(path))


def write_all(file: IO[bytes], data: bytes) -> None:
    """Add `data` to a file that `open_in_place` gave; it is on disk when this returns."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) or 0 :]
    os.fsync(file.fileno())


def write_json(path: Path, value: Any) -> None:
    """`value` as readable JSON with sorted keys, so that equal contents are equal files."""
    with new_file(path) as part:
        text = json.dumps(value, ensure_ascii=False, indent=1, sort_keys=True)
        part.write_text(text + "\n", encoding="utf-8")


def known_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if there is none, or a damaged one."""
    try:
        return read_object(path)
    except (OSError, ValueError):
        return None


def read_records(path: Path) -> list[tuple[int, dict[str, Any] | None]]:
    """The lines of a file that are not empty, by number: a JSON object each, None if damaged."""
    refuse_special(path)
    found: list[tuple[int, dict[str, Any] | None]] = []
    for place, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            try:
                value = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError):
                value = None
            found.append((place, value if isinstance(value, dict) else None))
    return found


def checksum(path: Path) -> str:
    """The SHA-256 of a regular file, in hexadecimal."""
    refuse_special(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sweep(folder: Path) -> None:
    """Remove what a killed run left half-written anywhere under `folder`."""
    remove(folder.rglob(PREFIX + "*"))


def remove(paths: Iterable[Path]) -> None:
    """Remove files, links and folders with what is in them."""
    for part in list(paths):
        if part.is_dir() and not part.is_symlink():
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink(missing_ok=True)


LOCK, OWNER = ".lock", ".lock-owner.json"


def hold(path: Path) -> IO[bytes] | None:
    """The file at `path`, locked until it is closed; None if another process holds it."""
    while True:
        file = open_in_place(path)
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
            write_json(folder / OWNER, owner)
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
        owner = read_object(folder / OWNER)
        process, host = int(owner["process"]), str(owner["host"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return "another process"
    known = host.isprintable() and len(host) < 256
    return f"process {process} on {host}" if known else f"process {process}"
