"""A SHA-256 of every file of a checkpoint or release, written with it, checked before use.

TensorStore notices some damage by itself, but not a flipped bit in an uncompressed array or in the
description of one: of single flips, a third were restored as if nothing were wrong.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from gshard.mt import atomic

FILE = "checksums.json"
_WRITTEN_LATER = (FILE, "commit_success.txt")  # the latter by Orbax, when a checkpoint is complete
_STAMPED = "_CHECKPOINT_METADATA"  # gets the time at which it was complete
_THREADS = 8  # hashing leaves Python's lock to others


def write(folder: Path, names: Sequence[str] = ()) -> None:
    """Add the checksums of the files in `folder` to it: all of them, or those named."""
    atomic.write_json(folder / FILE, _sums(folder, names or _files(folder)))


def problem_of(folder: Path, names: Sequence[str]) -> str:
    """What is wrong with the files of `folder` that are named, or ""; there may be others."""
    try:
        expected = atomic.read_object(folder / FILE)
        found = _sums(folder, names)
    except FileNotFoundError as error:
        return f"{Path(error.filename).relative_to(folder)} is missing"
    except (OSError, ValueError) as error:
        return f"a file cannot be read: {error}"
    return next((_different(name) for name in names if expected.get(name) != found[name]), "")


def problem(folder: Path, items: Sequence[str] = ()) -> str:
    """What is wrong with the files of `folder`, or "" if they are those that were written.

    With `items`, of its subfolders only those are looked at.
    """
    try:
        written = atomic.read_object(folder / FILE)
        expected = {name: str(digest) for name, digest in written.items()}
    except FileNotFoundError:
        return f"it has no {FILE}"
    except (OSError, ValueError) as error:
        return f"{FILE} cannot be read: {error}"

    def wanted(name: str) -> bool:
        return not items or "/" not in name or name.split("/")[0] in items

    there = _files(folder)
    for name in sorted(expected.keys() - set(there)):
        if wanted(name):
            return f"{name} is missing"
    try:
        found = _sums(folder, [name for name in there if wanted(name)])
    except OSError as error:
        return str(error)
    for name, digest in found.items():
        if name not in expected:
            return f"{name} does not belong to it"
        if digest != expected[name]:
            return _different(name)
    return ""


def _different(name: str) -> str:
    return f"{name} is not as it was written"


def _files(folder: Path) -> list[str]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [path.relative_to(folder).as_posix() for path in paths]
    return [name for name in names if name.split("/")[-1] not in _WRITTEN_LATER]


def _digest(path: Path) -> str:
    if path.name != _STAMPED:
        return atomic.checksum(path)
    data = path.read_bytes()
    try:
        described = dict(json.loads(data))
        described.pop("commit_timestamp_nsecs", None)
        data = json.dumps(described, sort_keys=True).encode()
    except (ValueError, TypeError):
        pass  # damaged, and so different
    return hashlib.sha256(data).hexdigest()


def _sums(folder: Path, names: Sequence[str]) -> dict[str, str]:
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        digests = pool.map(lambda name: _digest(folder / name), names)
        return dict(zip(names, digests, strict=True))
