"""Why a pair is dropped: one test for each thing that is wrong with localised text.

The tests run from the cheapest to the dearest, and the first that fails names the reason.
"""

from __future__ import annotations

import re
from collections import Counter

from gshard.mt.data.locales import LATIN, count_letters, in_script, scripts_of

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


def has_gap(english: str, text: str) -> bool:
    """Whether a paragraph of a document lost something inside a sentence."""
    return bool(_GAP.search(english) or _GAP_OTHER.search(text))


def reason_to_drop(language: str, english: str, text: str) -> str | None:
    """The reason why a normalised pair is no translation worth learning, or None."""
    if not english or not text:
        return "empty"
    words = english.split()
    if max(len(english), len(text)) > MAX_CHARACTERS or len(words) > MAX_WORDS:
        return "too long"
    if english.casefold() == text.casefold():
        return "untranslated"
    if _IDENTIFIER.fullmatch(english):
        return "identifier"
    if _CREDITS.search(english):
        return "credits or header"
    bare_english, bare_text = _bare(english), _bare(text)
    if reason := _bad_english(english, bare_english, words):
        return reason
    if reason := _bad_text(language, english, text, bare_text):
        return reason
    if placeholders(english) != placeholders(text):
        return "placeholders differ"
    return "English left" if _english_left(language, bare_english, bare_text) else None


def _bare(text: str) -> str:
    """The text without placeholders and addresses: what is left is language."""
    if _MARK.search(text):
        text = PLACEHOLDER.sub(" ", text)
    return _URL.sub("", text) if "://" in text or "www." in text else text


def _bad_english(english: str, bare: str, words: list[str]) -> str | None:
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
    theirs = {word.lower() for word in _WORD.findall(english)}
    if sum(word in theirs for word in mine) >= 0.75 * len(mine):
        return True
    return len(mine) >= 5 and sum(
        bool(_FUNCTION_WORDS.fullmatch(word)) for word in mine
    ) >= 0.3 * len(mine)
