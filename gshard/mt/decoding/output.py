"""Where translations go: to standard output, or to a file that an interrupted command goes on with.

Lines are added to `FILE.part`, and beside it stands how many lines of which text they are the
translations of; at the end it becomes FILE. The same command goes on after what is there.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from gshard.mt import atomic
from gshard.mt.errors import UserError


class Output:
    """A stream: whole lines in UTF-8, whatever the terminal's settings, and out at once."""

    done = 0  # lines of text that are translated, also by an earlier command

    def __init__(self, stream: IO[bytes]):
        self._stream = stream

    def after_done(self, chunks: Iterable[list[str]]) -> Iterator[list[str]]:
        """The text without the lines that are translated already."""
        yield from chunks

    def add(self, texts: Sequence[str], lines: Iterable[str]) -> None:
        """Write the translations of some texts, all of them before this returns."""
        self._stream.write(_bytes(lines))
        self._stream.flush()
        self.done += len(texts)

    def finish(self) -> None:
        """All is written."""


class FileOutput(Output):
    """A file; `settings` is all that the translations depend on beside the text."""

    def __init__(self, path: Path, settings: Mapping[str, Any]):
        self._path = path
        self._part, self._note = (
            path.with_name(path.name + end) for end in (".part", ".part.json")
        )
        self._settings = dict(settings)
        self._read = hashlib.sha256()  # of the text up to here
        self._digest = ""
        try:
            note = atomic.read_object(self._note)
            self.done, self._digest = int(note["done"]), str(note["text"])
            size, begun_with = int(note["bytes"]), dict(note["settings"])
            if min(self.done, size) < 0 or size > self._part.stat().st_size:
                raise ValueError("it is not of this file")
        except (OSError, ValueError, KeyError, TypeError):  # none, or a damaged one
            size, begun_with = 0, self._settings
            self.done = 0
        if begun_with != self._settings:
            changed = [k for k, v in self._settings.items() if begun_with.get(k) != v]
            self._refuse(f"with another {' and another '.join(changed)}")
        for place in (path, self._part):
            if place.exists():
                atomic.refuse_special(place)
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._part.open("ab"):
            pass
        os.truncate(self._part, size)

    def after_done(self, chunks: Iterable[list[str]]) -> Iterator[list[str]]:
        """The text without the lines that are translated already, which must be the same."""
        left = self.done
        for chunk in chunks:
            known, new = chunk[:left], chunk[left:]
            left -= len(known)
            self._take(known)
            if known and not left and self._read.hexdigest() != self._digest:
                self._refuse("with other text")
            if new:
                yield new
        if left:
            self._refuse(f"with a text of {self.done:,} lines or more")

    def add(self, texts: Sequence[str], lines: Iterable[str]) -> None:
        """Add the translations of some texts, and write down how far that is."""
        with self._part.open("ab") as file:
            file.write(_bytes(lines))
            file.flush()
            os.fsync(file.fileno())
        self._take(texts)
        self.done += len(texts)
        note = {
            "done": self.done,
            "bytes": self._part.stat().st_size,
            "text": self._read.hexdigest(),
            "settings": self._settings,
        }
        atomic.write_json(self._note, note)

    def finish(self) -> None:
        """Give the file its name."""
        self._part.replace(self._path)
        self._note.unlink(missing_ok=True)

    def _take(self, texts: Iterable[str]) -> None:
        for text in texts:
            self._read.update(text.encode("utf-8", "surrogatepass") + b"\n")

    def _refuse(self, how: str) -> None:
        raise UserError(f"{self._part} was begun {how}; remove it to begin anew")


def _bytes(lines: Iterable[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()
