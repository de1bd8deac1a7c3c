"""Documents of text, HTML or subtitles as sentences to translate, and put together again.

A document is cut into parts. Some are translated; the others (whitespace, lines without a letter or
digit, tags, comments, scripts) come out exactly as they went in. In HTML each run of text between
two tags is translated by itself: a sentence with an emphasised word is three runs.

Files are text, HTML, subtitles, and ZIP archives whose XML parts have the text (`opened`). The text
of an archive (an office document, a book) is lines, one for each run, and `written` puts translated
lines in their places: what is around them, formatting too, stays byte for byte. Word processors cut
a sentence into runs where its spelling was checked or it was edited; neighbours of equal formatting
are one line. XML is never parsed: entities and addresses in it do nothing.
"""

from __future__ import annotations

import html
import io
import lzma
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from gshard.mt.decoding.texts import is_unspaced

Cut = Callable[[str], list[str]]  # a paragraph in sentences; joined they are the paragraph

# Every pattern reads a character a bounded number of times, whatever the text: `\s*` begins where
# whitespace does, and `*+` never goes back.
_LINE_ENDS = re.compile(r"((?<!\s)\s*[\r\n\u2028\u2029]\s*)")
_SKIPPED = ("code", "kbd", "samp", "var", "template", "svg", "math")
_RAW = ("script", "style", "textarea", "xmp", "iframe", "noembed", "noframes")  # no tags inside
_VOID = (
    "area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track",
    "wbr",
)  # fmt: skip
# Comments, declarations and tags as browsers find them: without an end they are the rest.
_SPACE = r"[\t\n\f\r ]"
_ATTRIBUTE = (
    r"([^\t\n\f\r />][^\t\n\f\r />=]*+)"
    rf"""(?>{_SPACE}*={_SPACE}*("[^"]*+"?|'[^']*+'?|[^\t\n\f\r >]*+))?"""
)
_MARKUP = re.compile(
    r"<!--(?:-?>|.*?(?:--!?>|\Z))"
    r"|<(?:[!?]|/(?![a-zA-Z]))[^>]*+>?"
    r"|<(?P<close>/?)(?P<name>[a-zA-Z][^\t\n\f\r />]*+)"
    rf"(?P<attributes>(?>[\t\n\f\r /]++|{_ATTRIBUTE})*+)>?",
    re.DOTALL,
)
_CUES = re.compile(r"(^[ \t]*[0-9]+[ \t]*$|^.*-->.*$)", re.MULTILINE)  # a number, its times
_HUGE = re.compile(r"&#[0-9]{1000,};?")  # more digits than `html` takes: no character


class Part(NamedTuple):
    """A piece of a document: to be translated, or to be kept.

    `gap` says that it is kept whitespace between two sentences of one paragraph.
    """

    text: str
    is_translated: bool = False
    gap: bool = False


class Document:
    """The parts of a document; `sentences` are those to be translated, in order."""

    def __init__(self, parts: Sequence[Part], *, is_html: bool = False):
        self.parts = tuple(part for part in parts if part.text or part.gap)
        self.sentences = [part.text for part in self.parts if part.is_translated]
        self._is_html = is_html

    def joined(self, translations: Sequence[str], target: str) -> str:
        """The document with these translations of its sentences, in the language `target`."""
        found = iter(translations)
        said = (
            self._written(on_one_line(next(found).strip()))
            if part.is_translated
            else _kept(part, target)
            for part in self.parts
        )
        return "".join(said)

    def _written(self, translation: str) -> str:
        line = on_one_line(translation)
        return html.escape(line, quote=False) if self._is_html else line


def from_text(text: str, cut: Cut) -> Document:
    """Plain text: line ends and the whitespace around them are kept."""
    parts: list[Part] = []
    for n, piece in enumerate(_LINE_ENDS.split(text)):
        parts += [Part(piece)] if n % 2 else _paragraph(piece, cut)
    return Document(parts)


def from_html(source: str, cut: Cut) -> Document:
    """HTML, a page or a fragment: everything but runs of text is kept byte for byte."""
    parts: list[Part] = []
    last = 0
    for start, end in runs(source):
        parts.append(Part(source[last:start]))
        parts += _run(source[start:end], cut)
        last = end
    parts.append(Part(source[last:]))
    return Document(parts, is_html=True)


def from_subtitles(source: str, cut: Cut) -> Document:
    """Subtitles as .srt files have them: numbers and times of cues are kept."""
    parts: list[Part] = []
    for n, piece in enumerate(_CUES.split(source)):
        parts += [Part(piece)] if n % 2 else from_text(piece, cut).parts
    return Document(parts)


READERS = {"text": from_text, "html": from_html, "subtitles": from_subtitles}


def on_one_line(text: str) -> str:
    """Text with spaces in place of its line ends."""
    return _LINE_ENDS.sub(" ", text)


def _kept(part: Part, target: str) -> str:
    """What is between two sentences depends on whether the target puts spaces there."""
    if not part.gap:
        return part.text
    if is_unspaced(target):
        return "" if part.text == " " else part.text
    return part.text or " "


def _paragraph(text: str, cut: Cut) -> Iterator[Part]:
    """The sentences of a paragraph, and what is between them."""
    if not any(c.isalnum() for c in text):
        yield Part(text)
        return
    before, inner, after = _stripped(text)
    yield Part(before)
    gap = ""
    for n, sentence in enumerate(cut(inner)):
        lead, spoken, trail = _stripped(sentence)
        if n:
            yield Part(gap + lead, gap=True)
        yield Part(spoken, is_translated=bool(spoken))
        gap = trail
    yield Part(gap + after)


def _run(source: str, cut: Cut) -> Iterator[Part]:
    """A run of text in HTML, where a line end is a space like any other."""
    text = unescaped(source)
    if not any(c.isalnum() for c in text):
        yield Part(source)
        return
    before, inner, after = _stripped(text)
    parts = [Part(before), *_paragraph(" ".join(inner.split()), cut), Part(after)]
    for part in parts:
        yield part if part.is_translated or part.gap else part._replace(text=_escaped(part.text))


def _escaped(text: str) -> str:
    return html.escape(text, quote=False).replace("\xa0", "&nbsp;")


def _stripped(text: str) -> tuple[str, str, str]:
    """The whitespace before a text, the text, and the whitespace after it."""
    inner = text.strip()
    if not inner:
        return text, "", ""
    start = text.index(inner)
    return text[:start], inner, text[start + len(inner) :]


def runs(source: str, kept: tuple[str, ...] = ()) -> Iterator[tuple[int, int]]:
    """Where the runs of text to translate are; elements with a name of `kept` have none."""
    skipped: list[str] = []  # the open element that is not translated, and its like
    last = 0
    while markup := _MARKUP.search(source, last):
        if last < markup.start() and not skipped:
            yield last, markup.start()
        last = markup.end()
        name, attributes = (markup["name"] or "").lower(), markup["attributes"] or ""
        if markup["close"]:
            if skipped and name == skipped[0]:
                skipped.pop()
        elif name in _RAW:
            end = re.compile(rf"</{name}(?=[\t\n\f\r />])", re.IGNORECASE).search(source, last)
            last = end.start() if end else len(source)
        elif (
            (name == skipped[0] if skipped else name in (*_SKIPPED, *kept) or _is_kept(attributes))
            and name not in _VOID
            and not attributes.endswith("/")
        ):
            skipped.append(name)
    if last < len(source) and not skipped:
        yield last, len(source)


def _is_kept(attributes: str) -> bool:
    """Whether an element says that it is not to be translated."""
    given: dict[str, str] = {}
    for found in re.finditer(_ATTRIBUTE, attributes):
        if (name := found[1].lower()) in ("translate", "class") and name not in given:
            value = found[2] or ""  # the first one counts
            given[name] = unescaped(value.strip(value[:1] if value[:1] in "\"'" else ""))
    return given.get("translate") == "no" or "notranslate" in given.get("class", "").split()


def unescaped(text: str) -> str:
    """Text with characters in place of its entities."""
    return html.unescape(_HUGE.sub("\ufffd", text))


LARGEST = 4 << 20  # bytes of a file, of an archive's text, unpacked,
_MOST = 32 << 20  # and of all its parts
_UNPACKED = (zipfile.BadZipFile, zlib.error, lzma.LZMAError)
_BROKEN = (*_UNPACKED, EOFError, OSError, RuntimeError, ValueError)
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
    for start, end in runs(source[body:], _NOTES):
        if any(c.isalnum() for c in source[body + start : body + end]):
            yield body + start, body + end, False


PLAIN = {".htm": "html", ".html": "html", ".srt": "subtitles", ".txt": "text"}  # UTF-8
_Runs = Callable[[str], Iterator[Run]]
_ARCHIVES: dict[str, tuple[str, _Runs]] = {  # names of the parts with text, and where it is in them
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

    def __init__(
        self, parts: dict[zipfile.ZipInfo, bytes], texts: list[zipfile.ZipInfo], runs: _Runs
    ):
        self._parts = parts
        self._sources = {info.filename: parts[info].decode("utf-8-sig") for info in texts}
        self._runs = {name: list(runs(source)) for name, source in self._sources.items()}
        lines: list[list[str]] = []
        for name, source in self._sources.items():
            for start, end, continues in self._runs[name]:
                if not continues:
                    lines.append([])
                lines[-1].append(unescaped(source[start:end]))
        self.text = "\n".join(on_one_line("".join(line)) for line in lines)

    def written(self, text: str) -> bytes:
        """The file with these lines in place of its own."""
        lines, made = iter(text.split("\n")), io.BytesIO()
        with zipfile.ZipFile(made, "w") as archive:
            for info, data in self._parts.items():
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
            names, runs_of = _ARCHIVES[suffix]
            texts = [info for info in infos if re.fullmatch(names, info.filename)]
            if not texts:
                raise ValueError(f"no part of it has a name such as {names}")
            for what, of, most in (("text has", texts, LARGEST), ("parts have", infos, _MOST)):
                if sum(info.file_size for info in of) > most:
                    raise ValueError(f"its {what} more than {most:,} bytes")
            found = _Archive({info: archive.read(info) for info in infos}, texts, runs_of)
    except _BROKEN as error:
        raise ValueError(f"no {'UTF-8' if suffix in PLAIN else suffix}: {error}") from None
    return Opened(found.text, "text", found.written)
