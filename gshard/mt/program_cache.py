"""JAX's cache of compiled programs, with entries that are verified before they are loaded.

JAX passes the contents of a file to XLA, which loads them as native code: a flipped bit, or a file
that a killed process left incomplete, can crash the process. Here every entry begins with a
checksum of its key and contents. One that does not match is removed, and its program is compiled
again.
"""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any

_NAME = "-checked"  # entries that JAX alone has written have other names
_DIGEST = hashlib.sha256().digest_size


class CheckedCache:
    """A cache of JAX's, with checksums; `made` is one that keeps files in a folder."""

    def __init__(self, made: Any):
        self._made, self._path = made, made._path

    def get(self, key: str) -> bytes | None:
        """What is kept under a key, if it is as it was written."""
        found = self._made.get(key + _NAME)
        if found is None:
            return None
        value = bytes(found[_DIGEST:])
        if found[:_DIGEST] == _checksum(key, value):
            return value
        with contextlib.suppress(OSError):  # JAX writes no entry that is there already
            (self._path / f"{key}{_NAME}-cache").unlink()
        return None

    def put(self, key: str, value: bytes) -> None:
        """Keep this under a key, unless something is there."""
        self._made.put(key + _NAME, _checksum(key, value) + value)


def _checksum(key: str, value: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\0" + value).digest()
