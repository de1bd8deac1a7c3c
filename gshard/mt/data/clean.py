"""From a raw message to clean sentence pairs: unwrap, normalise, split and filter.

A message of a program is not yet a sentence: it may have a context as a prefix, an underscore that
marks its accelerator key, tags and entities, and several paragraphs. A pair is dropped for one of
the things that are wrong with localised text: the tests run from the cheapest to the most
expensive, and the first that fails names the reason.
"""

from __future__ import annotations

import functools
import html
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator

from gshard.mt.data.locales import LATIN, count_letters, in_script, scripts_of
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
    if reason := _reason_to_drop_raw(raw):
        dropped[reason] += 1
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


def _reason_to_drop_raw(raw: Raw) -> str | None:
    if not raw.english or not raw.text:
        return "empty"
    if raw.english == raw.text:
        return "untranslated"
    if max(len(raw.english), len(raw.text)) > LONGEST_RAW:
        return "too long"
    # A paragraph of a document that lost something inside a sentence.
    is_document = raw.kind == "document"
    has_gap = is_document and (_GAP.search(raw.english) or _GAP_OTHER.search(raw.text))
    return "gap in the sentence" if has_gap else None


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


MAX_CHARACTERS = 700
MAX_WORDS = 100

# printf and Python formats, Qt's %1, shell and template variables, %percent% and @at@ marks.
PLACEHOLDER = re.compile(
    r"""
      %\([\w.\- ]+\)[-\#0 +]*\d*(?:\.\d+)?[a-zA-Z]
    | %(?:\d+\$)?[-\#0+']*\d*(?:\.\d+|\.\*)?(?:hh|h|ll|l|z|j|t|q|L|I64)?
      [diouxXeEfFgGaAcspnmS@](?![a-zA-Z])
    | %[Ln]?\d{1,2} | %n\b | %[A-Za-z]\b | %%
    | \$\{[^}]*\} | \{\{[^}]*\}\} | \{[^{}]{0,40}\}
    | \$\w+\$? | @\w+@ | %\w+% | __\w+__ | \[%[^\]]*%\]
    """,
    re.X,
)

_MARK = re.compile(r"[%${@_\[]")  # without one of these there is no placeholder
_URL = re.compile(r"(?:https?://|www\.)\S+")
_ASCII_LETTER = re.compile(r"[A-Za-z]")
_SPACE = re.compile(r"\s")
_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?")  # noqa: RUF001
_IDENTIFIER = re.compile(
    r"""
      [A-Za-z0-9]+(?:[_.:\\\#|=]+[A-Za-z0-9]+)+[:.]?   # net.http, MAX_SIZE, a=b
    | [a-z]+(?:[A-Z][a-z0-9]*)+                        # camelCase
    | [A-Z0-9_]{5,}                                    # CONSTANT
    | \S*://\S+ | \S+@\S+                              # URLs and addresses
    | --?\S+ | <.*>
    """,
    re.X,
)
_CREDITS = re.compile(
    r"translator-credits|NAMES? OF TRANSLATORS|EMAILS? OF TRANSLATORS|ROLES OF TRANSLATORS"
    r"|Your names|Your emails|Launchpad Contributions|Rosetta|^Project-Id-Version|PLURAL-FORM"
    r"|^PO-Revision"
)
_CODE = re.compile(
    r"[{};]\s*$|^\s*[#/]{1,2}\S|\b(?:0x[0-9a-f]{3,}|\w+\(\)|\w+::\w+)|^\s*usage:|\\[a-z]+\{"
    r"|=\S+;|(?:^|\s)--[a-z]",
    re.I,
)
_USAGE = re.compile(r"^\s*usage:", re.I)
# A missing cross-reference or image: a space before the full stop, or empty brackets.
_GAP = re.compile(r"(?<=[^\W\d_]) (?:[.,;](?=\s|$)|\(\s*\))")
_GAP_OTHER = re.compile(r"(?<=[^\W\d_]) [.,](?=\s|$)")
_FUNCTION_WORDS = re.compile(
    r"(?:the|and|with|this|that|you|your|are|from|can|which|will|have|has|been|should|must|when"
    r"|there|if|of|to|is)"
)
# Characters a character: Chinese, Japanese and Korean say as much in a third of them.
_DENSE = frozenset(("zh", "zh_Hant", "ja", "ko", "yue", "lzh", "wuu", "gan"))


def placeholders(text: str) -> Counter[str]:
    """The multiset of placeholders; `%2$s` counts as `%s`, since translations reorder them."""
    if not _MARK.search(text):
        return Counter()
    return Counter(re.sub(r"^%\d+\$", "%", found) for found in PLACEHOLDER.findall(text))


def reason_to_drop(language: str, english: str, text: str) -> str | None:
    """The reason why a normalised pair is no translation worth learning, or None."""
    if not english or not text:
        return "empty"
    if max(len(english), len(text)) > MAX_CHARACTERS or len(english.split()) > MAX_WORDS:
        return "too long"
    if english.casefold() == text.casefold():
        return "untranslated"
    bare_text = _bare(text)
    if reason := _bad_english(english) or _bad_text(language, english, text, bare_text):
        return reason
    if placeholders(english) != placeholders(text):
        return "placeholders differ"
    return "English left" if _english_left(language, english, bare_text) else None


def _bare(text: str) -> str:
    """The text without placeholders and addresses: what is left is language."""
    if _MARK.search(text):
        text = PLACEHOLDER.sub(" ", text)
    return _URL.sub("", text) if "://" in text or "www." in text else text


@functools.lru_cache(1 << 16)  # a package has the same English in all of its languages
def _bad_english(english: str) -> str | None:
    if _IDENTIFIER.fullmatch(english):
        return "identifier"
    if _CREDITS.search(english):
        return "credits or header"
    bare, words = _bare(english), english.split()
    ascii_letters, letters = len(_ASCII_LETTER.findall(bare)), count_letters(bare)
    if ascii_letters < 2 or not re.search(r"[A-Za-z]{2}", bare):
        return "no words"
    if ascii_letters < 0.9 * letters:
        return "English side is not English"
    if letters < 0.45 * len(_SPACE.sub("", bare)):
        return "mostly symbols"
    if len(words) > 1 and len(bare.strip()) < 0.4 * len(english):
        return "mostly placeholders"
    if _USAGE.search(english) or (len(words) < 12 and _CODE.search(english)):
        return "code or command"
    return None


def _bad_text(language: str, english: str, text: str, bare: str) -> str | None:
    if not count_letters(bare):
        return "no words"
    if not in_script(language, bare):
        return "wrong script"
    ratio = (len(text) + 12) / (len(english) + 12)  # the 12 forgives short strings
    low, high = (0.22, 2.5) if language in _DENSE else (0.35, 3.0)
    return None if low <= ratio <= high else "length ratio"


def _english_left(language: str, english: str, bare: str) -> bool:
    """Whether the translation is English after all: its words are those of the English side."""
    if "latin" not in scripts_of(language):
        return len(LATIN.findall(bare)) > 0.65 * count_letters(bare)
    mine = [word.lower() for word in _WORD.findall(bare)]
    if len(mine) < 3 or language == "sco":  # Scots shares most of its words with English
        return False
    theirs = {word.lower() for word in _WORD.findall(_bare(english))}
    if sum(word in theirs for word in mine) >= 0.75 * len(mine):
        return True
    return len(mine) >= 5 and sum(
        bool(_FUNCTION_WORDS.fullmatch(word)) for word in mine
    ) >= 0.3 * len(mine)
