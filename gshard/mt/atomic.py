"""Atomic files and folders: written under a temporary name, then renamed.

A gathering may be killed at any moment or fill the disk; what a later run finds under its final
name is complete, and everything under a temporary name can be deleted. What is read may have been
damaged or replaced: only regular files are read and replaced.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

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
