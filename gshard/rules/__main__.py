"""`python -m gshard.rules`: the table of operators, docs/reference/operators.md, from the registry.

`python -m gshard.rules --update` brings it up to date; a test sees to that. Rows of primitives that
another release of JAX has are kept.
"""

from __future__ import annotations

import sys
from pathlib import Path

from jax.extend.core import Primitive
from jax.extend.core import primitives as exported

from gshard._jax import shard_map_p
from gshard.capture.flatten import REFS
from gshard.graph import CALLS
from gshard.operators.rule import Doc
from gshard.rules import RULES

PAGE = Path("docs/reference/operators.md")
_HEAD = """# Operators

Made by `python -m gshard.rules --update` from the rules in `gshard/rules`.

A dim in the second column splits for free: nothing is sent. One in the third takes rows from other
tiles by halo exchange or CollectivePermutes, and sends those rows only. One in the fourth needs a
collective over all tiles of the dim, of what the column names; `lowered.collectives` lists each
with its bytes, its reason and the line that caused it. Where there are several ways, the one that
sends the fewest bytes is taken. Primitives in italics are not exported by
`jax.extend.core.primitives`.

| primitive | free | by halo or permutes | by gather, exchange or reduction |
|---|---|---|---|
"""


def exported_primitives() -> dict[str, Primitive]:
    """The primitives that JAX exports, by the names under which it does."""
    found = {name: getattr(exported, name) for name in sorted(dir(exported))}
    return {name: value for name, value in found.items() if isinstance(value, Primitive)}


def table() -> str:
    """The page: a row per primitive that has a rule, or that is inlined before partitioning."""
    public = {primitive: name for name, primitive in exported_primitives().items()}
    rows = {}
    for primitive, rule in RULES.items():
        rows[primitive] = _row(rule.doc)
    for primitive in (*CALLS, shard_map_p):
        rows[primitive] = _row(Doc(free="inlined: as its body"))
    for primitive in REFS:
        rows[primitive] = _row(Doc(free="as reads and writes of a value"))
    named = sorted(
        (public[p].removesuffix("_p") if p in public else p.name, p not in public, row)
        for p, row in rows.items()
    )
    lines = [f"| {f'*{n}*' if private else f'`{n}`'} | {row} |" for n, private, row in named]
    return _HEAD + "\n".join(lines) + "\n"


def merged(page: str, old: str) -> str:
    """The page, with the rows of `old` for primitives that this release of JAX does not have."""

    def rows(text: str) -> dict[str, str]:
        listed = (line for line in text.splitlines() if line.startswith(("| `", "| *")))
        return {line.split(" | ")[0].strip("| `*"): line for line in listed}

    both = {**rows(old), **rows(page)}
    return _HEAD + "\n".join(both[name] for name in sorted(both)) + "\n"


def _row(doc: Doc) -> str:
    if doc.refused:
        return f"refused: {doc.refused} | |"
    return " | ".join((doc.free, doc.halo, doc.gather))


if __name__ == "__main__":
    if "--update" in sys.argv[1:]:
        PAGE.write_text(merged(table(), PAGE.read_text()))
    else:
        print(table(), end="")
