"""Text of any length, cut into pieces that a model can take; nothing is lost between them.

Cuts are made where they hurt least: at the ends of sentences, then of clauses, then between words,
and within a word only if it alone is too long. The pieces joined are the text.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence

Size = Callable[[Sequence[str]], list[int]]  # tokens of each text

# A cut may be made at the end of each match. Every pattern looks back instead of reading on: a
# million full stops take no longer than a million letters.
_ENDS = ".!?\u2026\u061f\u06d4\u0964\u0965\u0589\u1362"  # also those of Urdu, Hindi, Amharic ...
_CLOSING = "\"'\u201c\u201d\u2019\u00bb)\\]"
_WIDE_ENDS = "\u3002\uff01\uff1f\uff61"  # of Chinese and Japanese, with no space behind
_WIDE_CLOSING = "\u201d\u2019\u300d\u300f\uff09"
_SENTENCE = re.compile(
    rf"(?:(?<=[{_ENDS}])|(?<=[{_ENDS}][{_CLOSING}]))\s+"
    rf"|(?<=[{_WIDE_ENDS}])(?![{_WIDE_ENDS}{_WIDE_CLOSING}])\s*"
    rf"|(?<=[{_WIDE_ENDS}][{_WIDE_CLOSING}])\s*"
    r"|[\r\n\u2028\u2029]+"
)
_CLAUSE = re.compile(r"(?<=[,;:)\u060c\u061b\u2013\u2014])\s+|(?<=[\uff0c\u3001\uff1b\uff1a])")
_WORD = re.compile(r"\s+")


def cut(text: str, size: Size, longest: int) -> list[str]:
    """`text` as pieces of at most `longest` tokens; whole if it fits.

    Sentences are kept apart, since models learn from single ones, except that short ones (often
    the dot was that of an abbreviation) stay with the next. Below that the pieces are few.
    """
    return [text] if size([text])[0] <= longest else cut_sentences(text, size, longest)


def cut_sentences(text: str, size: Size, longest: int) -> list[str]:
    """The same at the ends of sentences, also where all of the text would fit."""
    return _at(
        text, size, longest, ((_SENTENCE, longest // 4), (_CLAUSE, longest), (_WORD, longest))
    )


def _at(
    text: str, size: Size, longest: int, levels: Sequence[tuple[re.Pattern[str], int]]
) -> list[str]:
    """Cut at the first of the levels, and at the next what is still too long."""
    if not levels:
        return _halved(text, size, longest)
    (pattern, full), *finer = levels
    atoms = _split(text, pattern)
    if len(atoms) == 1:
        return [text] if size([text])[0] <= longest else _at(text, size, longest, finer)
    pieces: list[str] = []
    room = -1  # tokens that the last piece may still take
    for atom, tokens in zip(atoms, size(atoms), strict=True):
        if tokens > longest:
            pieces += _at(atom, size, longest, finer)
            room = -1
        elif tokens <= room:
            pieces[-1] += atom
            room -= tokens
        else:
            pieces.append(atom)
            room = full - tokens
    # Joined text is as a rule no more tokens than its parts, but that is not guaranteed.
    checked: list[str] = []
    for piece, tokens in zip(pieces, size(pieces), strict=True):
        checked += [piece] if tokens <= longest else _halved(piece, size, longest)
    return checked


def _split(text: str, pattern: re.Pattern[str]) -> list[str]:
    ends = sorted({0, *(match.end() for match in pattern.finditer(text)), len(text)})
    return [text[a:b] for a, b in itertools.pairwise(ends)]


def _halved(text: str, size: Size, longest: int) -> list[str]:
    """Cut anywhere: spans of about `longest` characters, halved until they fit or are one each."""
    spans, fit = [text], False
    while not fit:
        fit, halves = True, []
        for span, tokens in zip(spans, size(spans), strict=True):
            if tokens <= longest or len(span) == 1:
                halves.append(span)
            else:
                fit = False
                step = min(longest, -(-len(span) // 2))
                halves += [span[i : i + step] for i in range(0, len(span), step)]
        spans = halves
    return spans
