"""Files and folders that are whole or absent: written beside their place, then renamed.

A gathering may be killed at any moment or fill the disk; what a later run finds under its final
name is complete, and everything under a temporary name is rubbish to be swept. What is read may
have been damaged, or put there by somebody else: only regular files are read and replaced.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PREFIX = ".part-"


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A temporary path in the same folder that becomes `path` when the block ends well."""
    if path.exists():
        refuse_special(path)  # /dev/null, say, is not to be replaced by a file
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=_PREFIX, suffix=path.suffix, dir=path.parent)
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
    part = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=path.parent))
    try:
        yield part
        part.chmod(0o755)
        if path.exists():
            shutil.rmtree(path)
        part.replace(path)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    """`value` as readable JSON with sorted keys, so that equal contents are equal files."""
    with new_file(path) as part:
        text = json.dumps(value, ensure_ascii=False, indent=1, sort_keys=True)
        part.write_text(text + "\n", encoding="utf-8")


def read_text(path: Path) -> str:
    """The text of a regular file."""
    refuse_special(path)
    return path.read_text(encoding="utf-8")


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; a ValueError if it holds anything else."""
    try:
        found = json.loads(read_text(path))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("it holds no JSON object")
    return found


def refuse_special(path: Path) -> None:
    """An OSError for a pipe or a device, which may never end, and for a folder."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.ENXIO, "is no regular file", str(path))


def checksum(path: Path) -> str:
    """The SHA-256 of a regular file, in hexadecimal."""
    refuse_special(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sweep(folder: Path) -> None:
    """Remove what a killed run left half-written under `folder`."""
    for part in folder.rglob(_PREFIX + "*"):
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink(missing_ok=True)
