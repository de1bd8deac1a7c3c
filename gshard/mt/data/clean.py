"""From a raw message to clean sentence pairs: unwrap, normalise, split and filter.

A message of a program is not yet a sentence: it may have a context as a prefix, an underscore that
marks its accelerator key, tags and entities, and several paragraphs.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator

from gshard.mt.data.filters import has_gap, reason_to_drop
from gshard.mt.data.readers import Raw

Pair = tuple[str, str]  # (English, translation)

LONGEST_RAW = 20_000  # characters; a message of this size is a licence or a whole page
_TAG = re.compile(
    r"<!--.*?-->|</?([A-Za-z][\w:.-]*)"
    r"(?:\s+[\w:.-]+\s*=\s*(?:\"[^\"]*\"|'[^']*'|\\\"[^\"]*\\\"|[^\s>]+))*\s*/?>",
    re.S,
)
_BREAK = re.compile(r"<br\s*/?>|</?p>|</li>|</h\d>", re.I)
_ENTITY = re.compile(r"&(?:[a-z]{2,8}|#\d+|#x[0-9a-f]+);", re.I)
_INVISIBLE = re.compile(
    "[\u0000-\u0008\u000b-\u001f\u200b\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\u00ad\ud800-\udfff]"
)
_PARAGRAPH = re.compile(r"\n\s*\n")
_ITEM = re.compile(r"\s*(?:[-*•]|\d+[.)]|\w+:)\s")
_BULLET = re.compile(r"^[-*•]\s+")
_CONTEXT = re.compile(r"^[\w @:,./-]{1,40}\|(?=\S)")
_CJK_ACCELERATOR = re.compile(r"\s*[(（\[][&_~][A-Za-z0-9.][)）\]]")  # noqa: RUF001
_AMPERSAND = re.compile(r"&(?=[^\s&;=\d])(?![a-z]{2,6};)")
_UNDERSCORE_NAME = re.compile(r"[A-Za-z0-9]_[a-z0-9]+[_.]|\w/_|%\w*_")
_ENGLISH_SENTENCE = re.compile(r"(?<=[a-z0-9)\"”’\]][.!?])\s+(?=[\"“(A-Z])")  # noqa: RUF001
_OTHER_SENTENCE = re.compile(
    r"(?:(?<=[^\W_][.!?؟।۔։።])|(?<=[)\"”’»\]][.!?؟।۔։።]))\s+|(?<=[。！？])\s*(?=\S)"  # noqa: RUF001
)


def clean(raw: Raw, dropped: Counter[str]) -> list[Pair]:
    """The clean pairs inside a raw one; what is dropped is counted by its reason."""
    if not raw.english or not raw.text:
        dropped["empty"] += 1
        return []
    if raw.english == raw.text:
        dropped["untranslated"] += 1
        return []
    if max(len(raw.english), len(raw.text)) > LONGEST_RAW:
        dropped["too long"] += 1
        return []
    if raw.kind == "document" and has_gap(raw.english, raw.text):
        dropped["gap in the sentence"] += 1
        return []
    english = strip_context(raw.english, raw.text)
    unwrapped = strip_markup(english, raw.text, tags=raw.kind != "document")
    if unwrapped is None:
        dropped["markup differs"] += 1
        return []
    kept = []
    for english, text in _paragraphs(*unwrapped):
        english, text = strip_accelerators(normalise(english), normalise(text), raw.kind)
        english, text = _BULLET.sub("", english), _BULLET.sub("", text)
        for pair in split_sentences(english, text):
            if reason := reason_to_drop(raw.language, *pair):
                dropped[reason] += 1
            else:
                kept.append(pair)
    return kept


def normalise(text: str) -> str:
    """NFC, without control and direction marks and halves of letters, white space one space."""
    text = _INVISIBLE.sub("", text)
    return " ".join(unicodedata.normalize("NFC", text).split())


def strip_context(english: str, text: str) -> str:
    """The message without what some programs put before it to tell two equal messages apart.

    `menu|Open`, KDE's `_: a verb\\nOpen`, `?verb:Open` and `verb^Open`: only where the translation
    has no such prefix, for then it belongs to the message.
    """
    if english.startswith("_:") and not text.startswith("_:"):
        return english.partition("\n")[2]  # without a line break nothing of the message is left
    head, caret, rest = english.partition("^")
    if caret and "^" not in text and len(head) < 60:
        english = rest
    if english.startswith("?") and ":" in english and not text.startswith("?"):
        english = english.split(":", 1)[1]
    if "|" not in text and (match := _CONTEXT.match(english)):
        english = english[match.end() :]
    return english


def strip_markup(english: str, text: str, tags: bool = True) -> Pair | None:
    """Both sides without tags and with entities as characters; None if their tags differ."""
    if tags and ("<" in english or "<" in text):
        if _tag_names(english) != _tag_names(text):
            return None
        english, text = (_TAG.sub("", _BREAK.sub(" \n\n ", side)) for side in (english, text))
    if _ENTITY.search(english) or _ENTITY.search(text):
        english, text = html.unescape(english), html.unescape(text)
    english, text = (
        side.replace("\\n", "\n").replace("\\t", " ").replace('\\"', '"')
        for side in (english, text)
    )
    return english, text


def _tag_names(text: str) -> Counter[str]:
    return Counter(match[1].lower() for match in _TAG.finditer(text) if match[1])


def strip_accelerators(english: str, text: str, kind: str) -> Pair:
    """Both sides without keyboard accelerators: `_File`, `&File`, `~File` and `文件(&F)`."""
    if kind not in ("message", "menu"):
        return english, text
    english, text = _CJK_ACCELERATOR.sub("", english), _CJK_ACCELERATOR.sub("", text)
    if "&" in english or "&" in text:
        english, text = _AMPERSAND.sub("", english), _AMPERSAND.sub("", text)
    if (
        english.count("_") == 1
        and text.count("_") <= 1
        and len(english) < 200
        and not _UNDERSCORE_NAME.search(english)
    ):
        english, text = re.sub(r"_(?=\w)", "", english), re.sub(r"_(?=\w)", "", text)
    if max(english.count("~"), text.count("~")) == 1:
        english, text = re.sub(r"~(?=\w)", "", english), re.sub(r"~(?=\w)", "", text)
    return english, text


def _paragraphs(english: str, text: str) -> Iterator[Pair]:
    """Paragraphs, and items of lists, where both sides have equally many."""
    mine = [part for part in _PARAGRAPH.split(english) if part.strip()]
    theirs = [part for part in _PARAGRAPH.split(text) if part.strip()]
    if not len(mine) == len(theirs) > 1:
        mine, theirs = [english], [text]
    for one, other in zip(mine, theirs, strict=True):
        lines = [line for line in one.split("\n") if line.strip()]
        others = [line for line in other.split("\n") if line.strip()]
        if len(lines) == len(others) > 1 and any(_ITEM.match(line) for line in lines):
            yield from zip(lines, others, strict=True)
        else:
            yield one, other


def split_sentences(english: str, text: str) -> list[Pair]:
    """Sentences, where both sides have equally many and each is as long as its place suggests."""
    if len(english) <= 60:
        return [(english, text)]
    mine = [part for part in _ENGLISH_SENTENCE.split(english) if part]
    theirs = [part for part in _OTHER_SENTENCE.split(text) if part]
    if not len(mine) == len(theirs) > 1:
        return [(english, text)]
    ratio = len(text) / len(english)
    pairs = list(zip(mine, theirs, strict=True))
    if all(0.45 < (len(b) + 6) / ((len(a) + 6) * ratio) < 2.2 for a, b in pairs):
        return pairs
    return [(english, text)]
