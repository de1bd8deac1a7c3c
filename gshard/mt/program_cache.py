"""JAX's cache of compiled programs, with entries that are verified before they are loaded.

JAX passes the contents of a file to XLA, which loads them as native code: a flipped bit, or a file
that a killed process left incomplete, can crash the process. Here every entry begins with a
checksum of its key and contents. One that does not match is removed, and its program is compiled
again.

A checksum finds damage, and no malice: whoever can write to the folder could have code run here. A
folder or an entry that others can write to is not used.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sys
from pathlib import Path
from typing import Any

from gshard.untrusted import own_folder, printable, refuse_of_others

_NAME = "-checked"  # entries that JAX alone has written have other names
_DIGEST = hashlib.sha256().digest_size


class CheckedCache:
    """A cache of JAX's, with checksums; `made` is one that keeps files in a folder."""

    def __init__(self, made: Any):
        self._made, self._path = made, made._path
        self._is_remote = "://" in str(self._path)  # a bucket, which has its own permissions
        self._is_own = self._is_remote or _is_own(Path(self._path).resolve())

    def get(self, key: str) -> bytes | None:
        """What is kept under a key, if it is as it was written."""
        found = self._made.get(key + _NAME) if self._is_own else None
        if found is None:
            return None
        value = bytes(found[_DIGEST:])
        with contextlib.suppress(OSError):
            if not self._is_remote:
                refuse_of_others(self._file(key), os.lstat(self._file(key)))
            if found[:_DIGEST] == _checksum(key, value):
                return value
        with contextlib.suppress(OSError):  # JAX writes no entry that is there already
            self._file(key).unlink()
        return None

    def put(self, key: str, value: bytes) -> None:
        """Keep this under a key, unless something is there."""
        if not self._is_own:
            return
        self._made.put(key + _NAME, _checksum(key, value) + value)
        if not self._is_remote:
            with contextlib.suppress(OSError):
                os.chmod(self._file(key), 0o600)  # whatever the umask is

    def _file(self, key: str) -> Any:
        return self._path / f"{key}{_NAME}-cache"


@functools.cache
def _is_own(folder: Path) -> bool:
    """Whether only this user can write to a folder; if not, a line says that it is not used."""
    try:
        os.close(own_folder(folder))
    except OSError as error:
        about = f"{printable(str(folder))}: {error.strerror}"
        print(f"gshard: compiled programs are not kept: {about}", file=sys.stderr)
        return False
    return True


def _checksum(key: str, value: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\0" + value).digest()
