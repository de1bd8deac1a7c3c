"""Where translations go: to standard output, or to a file that an interrupted command continues.

Lines are added to `FILE.part`, which one command at a time has locked. `FILE.part.json` says which
text is translated and how many of its lines are done. At the end `FILE.part` becomes FILE. The same
command, after an interruption, continues after the lines that are there.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from gshard.mt import atomic
from gshard.mt.errors import UserError
from gshard.mt.lock import hold


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

    def close(self) -> None:
        """Let go of what is held, finished or not."""


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
        if path.exists():
            atomic.refuse_special(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        file = hold(self._part)
        if file is None:
            raise UserError(
                f"another command writes to {path} at this moment (it has locked {self._part}); "
                "wait for it, or give another --out"
            )
        self._file = file
        try:
            size = self._begun()
            self._write_note(size)  # first, so that it tells whose the other file is
            self._file.truncate(size)
        except BaseException:
            self.close()
            raise

    def _begun(self) -> int:
        """The bytes that an earlier command wrote, after which this one continues."""
        try:
            note = atomic.read_object(self._note)
            self.done, self._digest = int(note["done"]), str(note["text"])
            size, begun_with = int(note["bytes"]), dict(note["settings"])
            if min(self.done, size) < 0 or size > self._size():
                raise ValueError("it is not of this file")
        except (OSError, ValueError, KeyError, TypeError) as error:  # none, or a damaged one
            if isinstance(error, FileNotFoundError) and self._size():
                self._refuse("by something else than a translation")
            size, begun_with = 0, self._settings
            self.done = 0
        if self.done and begun_with != self._settings:
            changed = [k for k, v in self._settings.items() if begun_with.get(k) != v]
            self._refuse(f"with another {' and another '.join(changed)}")
        return size

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
        before = self._size()
        try:
            atomic.write_all(self._file, _bytes(lines))
        except OSError:
            self._file.truncate(before)  # the half that a full disk took
            raise
        self._take(texts)
        self.done += len(texts)
        self._digest = self._read.hexdigest()
        self._write_note(self._size())

    def finish(self) -> None:
        """Give the file its name; its lock is the last thing to go."""
        self._note.unlink(missing_ok=True)
        self._part.replace(self._path)
        self.close()

    def close(self) -> None:
        """Let another command write to it."""
        self._file.close()

    def _size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def _write_note(self, size: int) -> None:
        note = {"done": self.done, "bytes": size, "text": self._digest, "settings": self._settings}
        atomic.write_json(self._note, note)

    def _take(self, texts: Iterable[str]) -> None:
        for text in texts:
            self._read.update(text.encode("utf-8", "surrogatepass") + b"\n")

    def _refuse(self, how: str) -> None:
        raise UserError(f"{self._part} was begun {how}; remove it to start over")


def _bytes(lines: Iterable[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()
