"""Rows of a language without those that repeat others, however many there are.

Whether a row repeats another is seen by fingerprints, which are written to disk first and looked at
in several passes: each is for some of the English, of which all translations are then together. So
what is remembered at a time is bounded, and all that grows with a language is a byte for each row.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from gshard.mt.data.splits import Row, fingerprint
from gshard.mt.data.spool import Spool

MAX_VARIANTS = 4
_AT_ONCE = 500_000  # rows of which the fingerprints are remembered

_LIGHT = re.compile(r"[\s.:…!?,;\"“”'’*。：]+")  # noqa: RUF001


class _Marks(NamedTuple):
    """The fingerprints of a row: of its English, and of the pair; those of a given split differ."""

    english: int
    pair: int
    given: bool


def without_duplicates(
    rows: Iterable[Row], dropped: Counter[str], scratch: Path | None = None
) -> Iterator[Row]:
    """Rows without repeated pairs, and with at most four translations of the same English.

    Rows with a given split are kept unless they are repeated exactly: the user chose that split.
    `rows` are read twice, and `scratch` is a folder for temporary files.
    """
    waiting: Spool[_Marks | None] = Spool(scratch)
    for row in rows:
        waiting.append(_marks(row))
    kept = bytearray(len(waiting))
    parts = -(-len(waiting) // _AT_ONCE)
    for part in range(parts):
        seen: set[int] = set()
        variants: Counter[int] = Counter()
        for number, marks in enumerate(waiting):
            if marks is None:
                dropped["untranslated"] += part == 0
            elif marks.english % parts == part:
                reason = _reason(marks, seen, variants)
                dropped.update([reason] if reason else ())
                kept[number] = not reason
    yield from itertools.compress(rows, kept)


def _reason(marks: _Marks, seen: set[int], variants: Counter[int]) -> str:
    """Why a row is dropped, or nothing."""
    if marks.pair in seen:
        return "duplicate"
    seen.add(marks.pair)
    if marks.given:
        return ""
    if variants[marks.english] >= MAX_VARIANTS:
        return "more than 4 translations"
    variants[marks.english] += 1
    return ""


def _marks(row: Row) -> _Marks | None:
    """What tells a row from others; None for one that is not translated."""
    if row.split:
        mark = fingerprint(f"{row.split}\t{row.english}\t{row.source}")
        return _Marks(mark, mark, given=True)
    english, source = (_LIGHT.sub(" ", side.casefold()).strip() for side in row[1::-1])
    if not english or not source or english == source:
        return None
    return _Marks(fingerprint(english), fingerprint(f"{english}\t{source}"), given=False)
