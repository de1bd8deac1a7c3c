"""`python -m gshard.rules`: the table of operators, docs/reference/operators.md, from the registry.

`python -m gshard.rules > docs/reference/operators.md` brings it up to date; a test sees to that.
"""

from __future__ import annotations

from jax.extend.core import Primitive
from jax.extend.core import primitives as exported

from gshard._jax import shard_map_p
from gshard.rule import Doc
from gshard.rules import RULES
from gshard.trace import CALLS, REFS

_HEAD = """# Operators

Made by `python -m gshard.rules > docs/reference/operators.md` from the rules in `gshard/rules`.

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


def _row(doc: Doc) -> str:
    if doc.refused:
        return f"refused: {doc.refused} | |"
    return " | ".join((doc.free, doc.halo, doc.gather))


if __name__ == "__main__":
    print(table(), end="")
