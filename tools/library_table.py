"""`python -m tools.library_table`: docs/reference/libraries.md, from a run of tests/libraries.

The tests run other people's programs unmodified, with the batch (or whatever they are over) split
over 8 devices, and compare all values with `jax.jit`'s. This runs them and lists what moves.
`--update` writes the page; a test fails while it leaves a program out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "tests" / "libraries"
PAGE = Path(__file__).parents[1] / "docs" / "reference" / "libraries.md"

_HEAD = """# Other people's programs

Made by `python -m tools.library_table --update` (in a checkout), which runs `tests/libraries`.

Each program is a library's own, unmodified, with `gshard.jit` for `jax.jit` and its batch, chains,
observations or right-hand sides split over 8 devices; `strict=True`, so that every primitive in it
has a rule. All values that it returns are compared with those of `jax.jit`, to the tolerance given.
The sums are AllReduces of gradients, statistics, losses and flags (does any member continue?): how
many the program has, and the bytes of the largest. Everything else that is sent is listed with its
reason: gathers would be. A Pallas attention kernel is in `tests/rules/test_pallas.py`.

| program | values | within | sums | largest | gathered, or moved otherwise |
|---|---:|---:|---:|---:|---|
"""


class _Collector:
    """What the programs of each test moved."""

    def __init__(self) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        from tests.libraries.programs import CHECKED

        start = len(CHECKED)
        yield
        self.rows[f"{item.path.stem}.{item.name}"] = CHECKED[start:]


def page(rows: dict[str, list[dict[str, Any]]]) -> str:
    """The page, from what was collected."""
    lines = []
    for test, programs in rows.items():
        for number, row in enumerate(programs):
            name = f"`{test}`" + (f", {number + 1}" if len(programs) > 1 else "")
            sums = [c for c in row["moved"] if c.kind == "all_reduce"]
            others = sorted({f"{c.kind}: {c.reason}" for c in row["moved"] if c not in sums})
            largest = f"{max(c.bytes for c in sums):,} B" if sums else ""
            listed = "<br>".join(others) or "nothing"
            lines.append(
                f"| {name} | {row['values']} | {row['tolerance']:g} "
                f"| {len(sums)} | {largest} | {listed} |"
            )
    return _HEAD + "\n".join(lines) + "\n"


def main() -> None:
    """Run the tests, and print or write the page."""
    collector = _Collector()
    arguments = [str(FOLDER), "-q", "-m", "slow or not slow", "-p", "no:cacheprovider"]
    failed = pytest.main(arguments, plugins=[collector])
    if failed:
        sys.exit(f"tests/libraries did not pass: {failed}")
    text = page(collector.rows)
    if "--update" in sys.argv:
        PAGE.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
