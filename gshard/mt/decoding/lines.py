"""Lines of text from a file or a pipe, in chunks, as they come.

A chunk ends when it is full, or when the other side pauses: a person who types a line has it
translated at once, and a file is read in pieces large enough for full batches. Only a line feed
ends a line; the other characters that Unicode calls line breaks are text.
"""

from __future__ import annotations

import codecs
import os
import select
from collections.abc import Iterator
from pathlib import Path

from gshard.mt.errors import UserError

_READ = 1 << 16  # bytes at a time
_PAUSE = 0.05  # seconds without anything to read that end a chunk
_LONGEST = 100_000_000  # characters of a line; a device may have no end


class TextLines:
    """The lines of the file at `path`, or of standard input; `name` is what messages call it."""

    def __init__(self, path: Path | None, encoding: str = "utf-8"):
        self.path = path
        self.name = "standard input" if path is None else str(path)
        self.encoding = _known(encoding)

    def check(self) -> None:
        """Say at once if the file cannot be read to its end, before anything is written.

        A pipe cannot be read twice: what is wrong in it is found when it comes.
        """
        if self.path is None or self.path.is_fifo() or self.path.is_char_device():
            return
        os.close(self._open())
        if self.path.stat().st_size == 0:
            raise UserError(f"{self.name} is empty: there is nothing to translate")
        for _ in self.chunks(1 << 20, 1 << 24):
            pass

    def chunks(self, lines: int, characters: int, first: int = 0) -> Iterator[list[str]]:
        """The lines in order, about so many at a time at most.

        With `first`, the first chunk has so many, and each has twice as many as the one before.
        """
        descriptor = 0 if self.path is None else self._open()
        try:
            yield from self._chunks(descriptor, lines, characters, first or lines)
        finally:
            if self.path is not None:
                os.close(descriptor)

    def _chunks(
        self, descriptor: int, most: int, characters: int, lines: int
    ) -> Iterator[list[str]]:
        text = _Decoder(self.name, self.encoding)
        ready: list[str] = []
        size = 0
        unfinished: list[str] = []  # the parts of a line whose end has not come yet
        held = 0  # characters of these
        while True:
            while len(ready) >= lines or size >= characters:
                now, ready = ready[:lines], ready[lines:]
                size = sum(map(len, ready))
                lines = min(2 * lines, most)
                yield now
            if ready and not _something_to_read(descriptor):
                yield ready
                ready, size = [], 0
            raw = _read(descriptor, self.name)
            first, *rest = text.decode(raw, final=not raw).split("\n")
            unfinished.append(first)
            if (held := held + len(first)) > _LONGEST:
                raise UserError(f"{self.name} has a line of more than {_LONGEST:,} characters")
            held = len(rest[-1]) if rest else held
            for start in rest:
                ready.append("".join(unfinished).removesuffix("\r"))
                size += len(ready[-1])
                unfinished = [start]
            if not raw:
                break
        if last := "".join(unfinished).removesuffix("\r"):
            ready.append(last)
        while ready:
            now, ready = ready[:lines], ready[lines:]
            lines = min(2 * lines, most)
            yield now

    def _open(self) -> int:
        assert self.path is not None
        try:
            if self.path.is_dir():
                raise UserError(f"{self.path} is a folder; name a file of text, a sentence a line")
            return os.open(self.path, os.O_RDONLY)
        except FileNotFoundError:
            raise UserError(f"no file {self.path}") from None
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {error.strerror}") from None


class _Decoder:
    """Bytes to text, with the line and byte of what is not text in this encoding.

    Halves of surrogate pairs are let through, since some programs write them; a byte order mark
    is no text.
    """

    def __init__(self, name: str, encoding: str):
        self._name = name
        self._encoding = encoding
        self._decoder = codecs.getincrementaldecoder(encoding)("surrogatepass")
        self._bytes = 0  # fed so far
        self._line = 1
        self._begun = False

    def decode(self, raw: bytes, *, final: bool) -> str:
        waiting = len(self._decoder.getstate()[0])  # the start of a character, from last time
        try:
            text = self._decoder.decode(raw, final)
        except UnicodeDecodeError as error:
            before = self._decoder.decode(raw[: max(0, error.start - waiting)])
            line = self._line + before.count("\n")
            byte = self._bytes - waiting + error.start
            raise UserError(
                f"{self._name}: line {line}, byte {byte:,} of the whole (0x"
                f"{error.object[error.start]:02x}) is not {self._encoding}: {error.reason}; "
                "name the encoding that it has, as --encoding latin-1"
            ) from None
        self._bytes += len(raw)
        self._line += text.count("\n")
        if text and not self._begun:
            self._begun = True
            text = text.removeprefix("\ufeff")
        return text


def _known(encoding: str) -> str:
    """The encoding's own name; an error if there is none, or if it is not one of text."""
    try:
        "".encode(encoding)
        codecs.getincrementaldecoder(encoding)
        return codecs.lookup(encoding).name
    except (LookupError, UnicodeError, TypeError, ValueError):
        raise UserError(
            f"no encoding {encoding!r}; utf-8, utf-16, latin-1, gb18030 and shift_jis are some"
        ) from None


def _read(descriptor: int, name: str) -> bytes:
    try:
        return os.read(descriptor, _READ)
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror}") from None


def _something_to_read(descriptor: int) -> bool:
    """Whether there is more at once; always in a file, also at its end."""
    try:
        return bool(select.select([descriptor], [], [], _PAUSE)[0])
    except (OSError, ValueError):  # not everything can be waited for
        return True
