"""`python -m tools.jit_table`: docs/reference/jit.md, from the tests that show each row.

A test marked with `tests.shows.shows` shows that something works as it does with `jax.jit`. What
differs is listed here. `--update` writes the page; a test fails while it is stale.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path

import jax

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "jit.md"
MODULES = (
    "test_transformations", "capture.test_placement", "capture.test_calls", "capture.test_export",
    "capture.test_debugging", "test_habits", "test_three_axes", "tensors.test_uneven",
    "test_repeated_calls", "capture.test_partly_manual", "test_memory_layouts",
)  # fmt: skip

_HEAD = """# `gshard.jit` compared with `jax.jit`

Made by `python -m tools.jit_table --update` (in a checkout) from the tests that show each row.

`gshard.jit` takes every keyword of `jax.jit`, and the function that it returns is called,
transformed, lowered and cached in the same way: JAX itself parses the arguments, traces the
function and passes the buffers. [What a call costs](../results/dispatch.md), and what
[other people's programs](libraries.md) send, is measured.
"""

_DIFFERS = {
    "arguments that are not arrays": "leaves of the arguments that are not arrays (functions, "
    "strings, None) are static by themselves; `jax.jit` refuses them",
    "results that are not arrays": "come out as the function returned them",
    "sizes that do not divide": "`in_shardings` and arguments may split any size; `jax.jit` "
    "refuses. Such results are `gshard.UnevenArray`s",
    "replicated arguments": "may be split by the program, which sends nothing, if that is not more "
    "expensive; `jax.jit` keeps them replicated",
    "arguments on one device": "with a mesh of one device or without one, do not determine where "
    "the program runs: it runs on `devices=`, else on the mesh that is set, of one device too, "
    "else on the largest mesh that arguments and keywords have, else on all devices",
    "memory layouts": "an argument in another layout than that of `in_shardings`, or of a compiled "
    "program, is copied; `jax.jit` refuses it",
    "references": "`lower` and `compile` are those of the function of their values",
    "inside of another trace": "a function of `gshard.jit` is its annotated program. Under "
    "`gshard.jit` the annotations stay; under `jax.jit` and the transformations they become "
    "sharding constraints for XLA",
    "`jax.export`": "arguments and results that do not divide are replicated. With a symbolic "
    "dim the annotations are exported as sharding constraints, which XLA carries out when the size "
    "is known (JAX does not run symbolic dims inside of manual regions); a split of that dim is "
    "refused",
    "`serialize_executable`": "refuses programs that close over arrays or whose arguments or "
    "results do not divide",
}


def page() -> str:
    """The page, from the tests."""
    for module in MODULES:
        importlib.import_module(f"tests.{module}")
    from tests.shows import SHOWN

    keywords = list(inspect.signature(jax.jit).parameters)[1:]
    missing = [k for k in keywords if k not in SHOWN]
    assert not missing, f"no test shows {missing}"
    rows = {name: SHOWN[name] for name in keywords}
    listed = sorted(SHOWN.items(), key=lambda row: MODULES.index(row[1].rpartition(".")[0]))
    others = {name: where for name, where in listed if name not in rows}
    lines = [_HEAD, "## Keywords\n", *_table("keyword", {f"`{k}`": v for k, v in rows.items()})]
    lines += ["\n## Transformations, habits and switches\n", *_table("what", others)]
    lines += ["\n## What differs\n", "| what | how |", "|---|---|"]
    lines += [f"| {name} | {how} |" for name, how in _DIFFERS.items()]
    return "\n".join(lines) + "\n"


def _table(title: str, rows: dict[str, str]) -> list[str]:
    return [
        f"| {title} | shown by |",
        "|---|---|",
        *(f"| {name} | `{where}` |" for name, where in rows.items()),
    ]


if __name__ == "__main__":
    if "--update" in sys.argv[1:]:
        PAGE.write_text(page())
    else:
        print(page(), end="")
