"""The mutations: data in `data/*.toml`, a text of a file and another one in its place."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_DATA = Path(__file__).parent / "data"
# Tables of sentences: why no test can notice a mutation, and why none can by a value.
_SENTENCES = ("equivalent", "unchanged")

KINDS = {
    "axis": "a wrong dim or axis",
    "cache": "a cache key without a field",
    "comparison": "a comparison off by one or turned round",
    "condition": "a condition left out",
    "cost": "wrong bytes, or the dearer plan",
    "dtype": "a wrong type",
    "extent": "a row too few or too many",
    "group": "a wrong device group or order",
    "mask": "a mask left out or wrong",
    "offset": "a wrong offset",
    "plan": "a wrong or missing step of a plan",
    "sum": "a sum forgotten, or another reduction",
}
_PRICE = {"cost": "price: every plan has the same values"}


@dataclass(frozen=True)
class Mutation:
    """In `file`, `old` (which stands there once) becomes `new`."""

    name: str
    kind: str
    file: str
    old: str
    new: str
    equivalent: str = ""  # why no test can notice it
    unchanged: str = ""  # why all values stay what they are

    @property
    def key(self) -> str:
        """Another one if the mutation is another."""
        text = "\0".join((self.name, self.file, self.old, self.new))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def line(self, source: str) -> int | None:
        """Where the mutation is in a text of its file; None if it is not there, or twice."""
        if source.count(self.old) != 1:
            return None
        start = source.index(self.old)
        same = next(
            (i for i, (a, b) in enumerate(zip(self.old, self.new, strict=False)) if a != b), 0
        )
        return source[: start + same].count("\n") + 1

    def applied(self, source: str) -> str | None:
        """The mutated text; None if the mutation does not fit it any more."""
        return None if self.line(source) is None else source.replace(self.old, self.new)


def load(folder: Path = _DATA) -> list[Mutation]:
    """All mutations, in the order of their files."""
    found: list[Mutation] = []
    for path in sorted(folder.glob("*.toml")):
        tables = tomllib.loads(path.read_text())
        equal, right = (tables.pop(table, {}) for table in _SENTENCES)
        right |= equal
        rows = [(file, *row) for file, table in tables.items() for row in table["mutants"]]
        found += [
            Mutation(
                name,
                kind,
                file,
                old,
                new,
                equal.get(name, ""),
                right.get(name, _PRICE.get(kind, "")),
            )
            for file, name, kind, old, new in rows
        ]
        if strange := right.keys() - {row[1] for row in rows}:
            raise ValueError(f"{path.name}: {', '.join(sorted(strange))} is no mutation")
    names = [mutation.name for mutation in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two mutations are called {', '.join(sorted(twice))}")
    if unknown := {m.kind for m in found} - KINDS.keys():
        raise ValueError(
            f"unknown kinds {', '.join(sorted(unknown))}; known are {', '.join(KINDS)}"
        )
    return found


def stale(mutations: Sequence[Mutation], root: Path) -> list[Mutation]:
    """Those that do not fit their files any more."""
    return [m for m in mutations if m.line((root / m.file).read_text()) is None]
