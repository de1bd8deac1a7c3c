"""The files of some folders as one flat list of paths, with archives and compression seen through.

Readers then need not care whether a catalog lies in a folder, in a Firefox language pack or in a
bzip2 file: `app.zip/de/messages.mo` is a path like any other.
"""

from __future__ import annotations

import bz2
import gzip
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

_ARCHIVES = (".zip", ".xpi")
_COMPRESSED: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.decompress, ".bz2": bz2.decompress}
MAX_BYTES = 200 << 20  # no message file is this long; a bomb or a mistake is


class Files:
    """Files under named roots; a path begins with its root's name, and reading it is lazy."""

    def __init__(self, roots: Mapping[str, Path]):
        self._places: dict[str, tuple[Path, str, str]] = {}
        self.broken: list[tuple[str, str]] = []
        for name, root in roots.items():
            for place in sorted(_files(root)):
                path = f"{name}/{place.relative_to(root).as_posix()}"
                if place.suffix in _ARCHIVES:
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
                for entry in archive.infolist():
                    if not entry.is_dir():
                        self._add(f"{path}/{entry.filename}", place, entry.filename)
        except (zipfile.BadZipFile, OSError) as error:
            self.broken.append((path, str(error)))

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __contains__(self, path: object) -> bool:
        return path in self._places

    def read(self, path: str) -> bytes:
        """The contents of the file at `path`, decompressed."""
        place, member, suffix = self._places[path]
        if place.stat().st_size > MAX_BYTES:
            raise ValueError(f"{path} is larger than {MAX_BYTES >> 20} MB")
        if member:
            # Archives are read file after file: the last one stays open.
            if self._open is None or self._open[0] != place:
                self._open = (place, zipfile.ZipFile(place))
            data = self._open[1].read(member)
        else:
            data = place.read_bytes()
        return _COMPRESSED[suffix](data) if suffix else data


def _files(root: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(root):
        for name in names:
            yield Path(folder, name)
