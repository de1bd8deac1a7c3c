"""Documents of text, HTML or subtitles as sentences to translate, and put together again.

A document is cut into parts. Some are translated; the others (whitespace, lines without a letter or
digit, tags, comments, scripts) come out exactly as they went in. In HTML each run of text between
two tags is translated by itself: a sentence with an emphasised word is three runs.
"""

from __future__ import annotations

import html
import re
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
        self.parts = tuple(parts)
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
    return Document([part for part in parts if part.text or part.gap])


def from_html(source: str, cut: Cut) -> Document:
    """HTML, a page or a fragment: everything but runs of text is kept byte for byte."""
    parts: list[Part] = []
    last = 0
    for start, end in runs(source):
        parts.append(Part(source[last:start]))
        parts += _run(source[start:end], cut)
        last = end
    parts.append(Part(source[last:]))
    return Document([part for part in parts if part.text or part.gap], is_html=True)


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
    given = {
        name.lower(): unescaped(value.strip(value[:1] if value[:1] in "\"'" else ""))
        for name, value in reversed(re.findall(_ATTRIBUTE, attributes))  # the first one counts
    }
    return given.get("translate") == "no" or "notranslate" in given.get("class", "").split()


def unescaped(text: str) -> str:
    """Text with characters in place of its entities."""
    return html.unescape(_HUGE.sub("\ufffd", text))
