"""Documents of text or HTML as sentences to translate, and put together again.

A document is cut into parts. Some are translated; the others (whitespace, lines without a letter or
digit, tags, comments, scripts) come out exactly as they went in. In HTML each run of text between
two tags is translated by itself: a sentence with an emphasised word is three runs.
"""

from __future__ import annotations

import html
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from html.parser import HTMLParser
from typing import NamedTuple

from gshard.mt.decoding.texts import is_unspaced

Cut = Callable[[str], list[str]]  # a paragraph in sentences; joined they are the paragraph

_LINE_ENDS = re.compile(r"(\s*[\r\n\u2028\u2029]\s*)")
_SKIPPED = ("script", "style", "code", "kbd", "samp", "var", "textarea", "template", "svg", "math")
_VOID = (
    "area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track",
    "wbr",
)  # fmt: skip


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
        self.parts = tuple(parts)
        self.sentences = [part.text for part in self.parts if part.is_translated]
        self._is_html = is_html

    def joined(self, translations: Sequence[str], target: str) -> str:
        """The document with these translations of its sentences, in the language `target`."""
        found = iter(translations)
        said = (
            self._written(next(found).strip()) if part.is_translated else _kept(part, target)
            for part in self.parts
        )
        return "".join(said)

    def _written(self, translation: str) -> str:
        return html.escape(translation, quote=False) if self._is_html else translation


def from_text(text: str, cut: Cut) -> Document:
    """Plain text: line ends and the whitespace around them are kept."""
    parts: list[Part] = []
    for n, piece in enumerate(_LINE_ENDS.split(text)):
        parts += [Part(piece)] if n % 2 else _paragraph(piece, cut)
    return Document([part for part in parts if part.text or part.gap])


def from_html(source: str, cut: Cut) -> Document:
    """HTML, a page or a fragment: everything but runs of text is kept byte for byte."""
    parts: list[Part] = []
    last = 0
    for start, end in _runs(source):
        parts.append(Part(source[last:start]))
        parts += _run(source[start:end], cut)
        last = end
    parts.append(Part(source[last:]))
    return Document([part for part in parts if part.text or part.gap], is_html=True)


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
    text = html.unescape(source)
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


def _runs(source: str) -> list[tuple[int, int]]:
    """Where the runs of text to translate are."""
    parser = _Parser(source)
    parser.feed(source)
    parser.close()
    joined: list[tuple[int, int]] = []
    for start, end in parser.found:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


class _Parser(HTMLParser):
    """Finds the places of text; what is not reported as text is left alone."""

    def __init__(self, source: str):
        super().__init__(convert_charrefs=False)
        self.found: list[tuple[int, int]] = []
        self._source = source
        lengths = map(len, source.split("\n"))
        self._lines = [0, *itertools.accumulate(length + 1 for length in lengths)]
        self._skipped: list[str] = []  # the open element that is not translated, and its like

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element begins."""
        if tag in _VOID:
            return
        given = dict(attrs)
        kept = given.get("translate") == "no" or "notranslate" in (given.get("class") or "").split()
        if tag == self._skipped[0] if self._skipped else kept or tag in _SKIPPED:
            self._skipped.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element without content; HTML ignores the slash, except in SVG and the like."""
        if not self._skipped:
            self.handle_starttag(tag, attrs)
            if self._skipped and tag not in ("script", "style", "textarea"):
                self._skipped.pop()

    def handle_endtag(self, tag: str) -> None:
        """An element ends."""
        if self._skipped and tag == self._skipped[0]:
            self._skipped.pop()

    def handle_data(self, data: str) -> None:
        """Text without references."""
        self._add(len(data))

    def handle_entityref(self, name: str) -> None:
        """A reference by name; the semicolon may be missing."""
        self._add_reference(len(name) + 1)

    def handle_charref(self, name: str) -> None:
        """A reference by number."""
        self._add_reference(len(name) + 2)

    def _add_reference(self, length: int) -> None:
        end = self._offset() + length
        self._add(length + (self._source[end : end + 1] == ";"))

    def _offset(self) -> int:
        line, column = self.getpos()
        return self._lines[line - 1] + column

    def _add(self, length: int) -> None:
        if not self._skipped:
            start = self._offset()
            self.found.append((start, start + length))
