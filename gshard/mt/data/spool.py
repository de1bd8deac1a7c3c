"""Records that wait on disk until all of them have been seen."""

from __future__ import annotations

import pickle
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Generic, TypeVar

T = TypeVar("T")
_TOGETHER = 10_000  # records written at once


class Spool(Generic[T]):
    """A list on disk, in a file without a name: nothing of it stays when the process ends."""

    def __init__(self, folder: Path | None = None):
        self._folder = folder
        self._file: IO[bytes] | None = None
        self._last: list[T] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, record: T) -> None:
        """Add a record at the end."""
        self._last.append(record)
        self._count += 1
        if len(self._last) == _TOGETHER:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115  (`finalize`)
                weakref.finalize(self, self._file.close)
            pickle.dump(self._last, self._file, pickle.HIGHEST_PROTOCOL)
            self._last = []

    def __iter__(self) -> Iterator[T]:
        """The records in their order; none may be added meanwhile."""
        if self._file is not None:
            self._file.seek(0)
            for _ in range(self._count // _TOGETHER):
                yield from pickle.load(self._file)
        yield from self._last
