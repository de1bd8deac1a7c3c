"""The files of some folders as one flat list of paths, with archives and compression seen through.

Readers then need not care whether a catalog is in a folder, in a Firefox language pack or in a
bzip2 file: `app.zip/de/messages.mo` is a path like any other.
"""

from __future__ import annotations

import bz2
import gzip
import os
import stat
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

_ARCHIVES = (".zip", ".xpi")
_COMPRESSED: dict[str, Callable[[Any], IO[bytes]]] = {".gz": gzip.open, ".bz2": bz2.open}  # type: ignore[dict-item]
MAX_BYTES = 128 << 20  # of a file, unpacked: no message file is this long; a bomb or a mistake is
MAX_MEMBERS = 200_000  # of an archive


class Files:
    """Files under named roots; a path begins with its root's name, and reading it is lazy."""

    def __init__(self, roots: Mapping[str, Path]):
        self._places: dict[str, tuple[Path, str, str]] = {}
        self.broken: list[tuple[str, str]] = []
        for name, root in roots.items():
            for place in sorted(_files(root)):
                path = f"{name}/{place.relative_to(root).as_posix()}"
                if why := _not_a_file(place):
                    self.broken.append((path, why))
                elif place.suffix in _ARCHIVES:
                    self._add_archive(path, place)
                else:
                    self._add(path, place, "")
        self._open: tuple[Path, zipfile.ZipFile] | None = None

    def _add(self, path: str, place: Path, member: str) -> None:
        suffix = next((suffix for suffix in _COMPRESSED if path.endswith(suffix)), "")
        self._places.setdefault(path.removesuffix(suffix), (place, member, suffix))

    def _add_archive(self, path: str, place: Path) -> None:
        try:
            with zipfile.ZipFile(place) as archive:
                entries = archive.infolist()
                if len(entries) > MAX_MEMBERS:
                    raise ValueError(f"{len(entries):,} files; {MAX_MEMBERS:,} are the most")
                for entry in entries:
                    if not entry.is_dir():
                        self._add(f"{path}/{entry.filename}", place, entry.filename)
        except Exception as error:  # a damaged archive raises a dozen kinds
            self.broken.append((path, str(error) or type(error).__name__))

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __contains__(self, path: object) -> bool:
        return path in self._places

    def read(self, path: str) -> bytes:
        """The contents of the file at `path`, decompressed."""
        place, member, suffix = self._places[path]
        if member:
            # Archives are read file after file: the last one stays open.
            if self._open is None or self._open[0] != place:
                self._open = (place, zipfile.ZipFile(place))
            file: IO[bytes] = self._open[1].open(member)
        else:
            file = place.open("rb")
        with file, _COMPRESSED[suffix](file) if suffix else file as unpacked:
            data = unpacked.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValueError(f"it unpacks to more than {MAX_BYTES >> 20} MB")
        return data


def _not_a_file(place: Path) -> str:
    """Why a path cannot be read as a file, or ""; a pipe would be waited for without end."""
    try:
        mode = place.stat().st_mode
    except OSError as error:
        return error.strerror or str(error)  # a link that leads nowhere, say
    return "" if stat.S_ISREG(mode) else "it is not a regular file"


def _files(root: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(root):
        for name in names:
            yield Path(folder, name)
