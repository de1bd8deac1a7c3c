"""Files to translate: text, HTML, subtitles, and ZIP archives whose XML parts have the text.

The text of an archive (an office document, a book) is lines, one for each run, and `written` puts
translated lines in their places: what is around them, formatting too, stays byte for byte. Word
processors cut a sentence into runs where its spelling was checked or it was edited; neighbours of
equal formatting are one line. XML is never parsed: entities and addresses in it do nothing.
"""

from __future__ import annotations

import html
import io
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from gshard.mt.serving import documents

LARGEST = 4 << 20  # bytes of a file,
_MOST = 32 << 20  # and of all parts of an archive, unpacked
_BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, ValueError)
_WORD = re.compile(r"<(?P<tag>[wa]:t)(?:\s[^<>]*)?>(?P<text>[^<]*)</(?P=tag)>")
# How a run begins, up to its text; and what may be between two of one sentence.
_FORMAT = re.compile(r"<[wa]:r(?:\s[^>]*)?>(<[wa]:rPr.*(?:/|</[wa]:rPr)>)?", re.DOTALL)
_SAME = re.compile(r"</[wa]:r>(?:<w:(?:proofErr|bookmark(?:Start|End))\b[^<>]*/>)*+")
_LANGUAGE = re.compile(r'<w:(?:lang|noProof)\b[^<>]*/>|\s(?:lang|altLang|dirty|err)="[^"]*"')
_EMPTY = re.compile(r"<[wa]:rPr(?:/>|></[wa]:rPr>)")
_NOTES = ("dc:creator", "dc:date", "meta:date-string", "text:tracked-changes", "text:note-citation")


Run = tuple[int, int, bool]  # from, to, and whether it is of the same line as the one before


def _word_runs(source: str) -> Iterator[Run]:
    """In .docx and .pptx: elements of text, each in a run with formatting."""
    last, before = 0, None
    for found in _WORD.finditer(source):
        between = source[last : found.start()]
        at = max(between.rfind(f"<{name}") for name in ("w:r>", "w:r ", "a:r>", "a:r "))
        run = _FORMAT.fullmatch(between, max(at, 0))
        formatting = run and _EMPTY.sub("", _LANGUAGE.sub("", run[1] or ""))
        same = run and formatting == before and _SAME.fullmatch(between, 0, at)
        yield *found.span("text"), bool(same)
        last, before = found.end(), formatting


def _marked_runs(source: str) -> Iterator[Run]:
    """In .odt and .epub: text between tags, as in HTML."""
    body = max(source.find("<office:body"), 0)
    for start, end in documents.runs(source[body:], _NOTES):
        if any(c.isalnum() for c in source[body + start : body + end]):
            yield body + start, body + end, False


PLAIN = {".htm": "html", ".html": "html", ".srt": "subtitles", ".txt": "text"}  # UTF-8
_ARCHIVES = {  # names of the parts with text, and where it is in them
    ".docx": (r"word/(document|(head|foot)er\d*|(foot|end)notes)\.xml", _word_runs),
    ".epub": (r".*\.([xX]?[hH][tT][mM][lL]?|ncx)", _marked_runs),
    ".odt": (r"content\.xml", _marked_runs),
    ".pptx": (r"ppt/(slides/s|notesSlides/notesS)lide\d+\.xml", _word_runs),
}
SUFFIXES = (*PLAIN, *_ARCHIVES)


class Opened(NamedTuple):
    """A file: its text, how that is read, and what makes a file of its translation."""

    text: str
    kind: str
    written: Callable[[str], bytes]


class _Archive:
    """The parts of an archive; `text` has a line for each run in them."""

    def __init__(self, parts: list[tuple[zipfile.ZipInfo, bytes]], suffix: str):
        names, runs = _ARCHIVES[suffix]
        self._parts = parts
        self._sources = {
            info.filename: data.decode("utf-8-sig")
            for info, data in parts
            if re.fullmatch(names, info.filename)
        }
        if not self._sources:
            raise ValueError(f"no part of it has a name such as {names}")
        self._runs = {name: list(runs(source)) for name, source in self._sources.items()}
        lines: list[list[str]] = []
        for name, source in self._sources.items():
            for start, end, continues in self._runs[name]:
                if not continues:
                    lines.append([])
                lines[-1].append(documents.unescaped(source[start:end]))
        self.text = "\n".join(documents.on_one_line("".join(line)) for line in lines)

    def written(self, text: str) -> bytes:
        """The file with these lines in place of its own."""
        lines, made = iter(text.split("\n")), io.BytesIO()
        with zipfile.ZipFile(made, "w") as archive:
            for info, data in self._parts:
                if info.filename in self._sources:
                    data = self._filled(info.filename, lines).encode()
                info.extra = b""  # no field may be in that of a book's first part
                archive.writestr(info, data)
        return made.getvalue()

    def _filled(self, name: str, lines: Iterator[str]) -> str:
        source, last = self._sources[name], 0
        made: list[str] = []
        for start, end, continues in self._runs[name]:
            before = source[last:start]
            if before.endswith("<w:t>"):
                before = f'{before[:-1]} xml:space="preserve">'  # spaces at the ends of its text
            made += [before, "" if continues else html.escape(next(lines), quote=False)]
            last = end
        return "".join((*made, source[last:]))


def opened(suffix: str, data: bytes) -> Opened:
    """The file whose name ends with this; ValueError if it is none."""
    try:
        if suffix in PLAIN:
            return Opened(data.decode("utf-8-sig"), PLAIN[suffix], str.encode)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            infos = archive.infolist()
            if len({info.filename for info in infos}) < len(infos):
                raise ValueError("a part of it is there twice")
            if sum(info.file_size for info in infos) > _MOST:
                raise ValueError(f"its parts have more than {_MOST:,} bytes")
            found = _Archive([(info, archive.read(info)) for info in infos], suffix)
    except _BROKEN as error:
        raise ValueError(f"no {'UTF-8' if suffix in PLAIN else suffix}: {error}") from None
    return Opened(found.text, "text", found.written)
