"""Text in, translations out: lines of a file or a pipe, and a file that a later command continues.

A chunk of lines ends when it is full, or when the other side pauses: a person who types a line has
it translated at once, and a file is read in pieces large enough for full batches. Only a line feed
ends a line; the other characters that Unicode calls line breaks are text.

Translations go to standard output or to a file. Lines are added to `FILE.part`, which one command
at a time has locked. `FILE.part.json` says which text is translated and how many of its lines are
done. At the end `FILE.part` becomes FILE. The same command, after an interruption, continues after
the lines that are there.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import select
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from gshard.errors import UserError
from gshard.mt import atomic
from gshard.mt.atomic import hold

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
        unfinished: list[str] = []  # the parts of a line whose end has not come yet
        size = held = 0  # characters of both
        raw = b"\n"
        while raw:
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
            if not raw and (last := "".join(unfinished).removesuffix("\r")):
                ready.append(last)
            while len(ready) >= lines or size >= characters or (ready and not raw):
                now, ready = ready[:lines], ready[lines:]
                size = sum(map(len, ready))
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
