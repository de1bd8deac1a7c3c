"""`python -m tools.walk jit` and `python -m tools.walk train`: the files in the order of a call.

A small program is run, and each file of gshard is printed when a function of it is called for the
first time: the order in which to read them. The reading orders of docs/design.md follow it;
`python -m tools.walk jit --update` brings the rows of the first one into that order.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import pkgutil
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = Path(__file__).parents[1] / "gshard"


def visited(call: Callable[[], Any]) -> list[str]:
    """The files of the package that `call` enters, by the first function called in each."""
    found: dict[str, None] = {}
    prefix = f"{PACKAGE}/"

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(prefix) and code.co_name != "<module>":
            found.setdefault(code.co_filename.removeprefix(prefix))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(found)


def import_all() -> None:
    """Import every module first, so that only calls are noted and no class bodies."""
    import gshard

    for module in pkgutil.walk_packages(gshard.__path__, "gshard."):
        if not module.name.endswith("__main__"):
            with contextlib.suppress(ModuleNotFoundError):  # of an extra that is not installed
                importlib.import_module(module.name)


def walk_jit() -> list[str]:
    """One product of matrices whose inner dim is split, and its result resharded."""
    import jax
    import jax.numpy as jnp

    import gshard

    jax.config.update("jax_num_cpu_devices", 8)

    def fn(x, w):
        x, w = gshard.split(x, 1, 8), gshard.split(w, 0, 8)
        return gshard.split(x @ w, 0, 8)

    x = jnp.ones((8, 16))
    jax.block_until_ready(x)

    def call() -> None:
        step = gshard.jit(fn)
        step(x, x.T)
        print(*step.lower(x, x.T).collectives, file=sys.stderr)

    return visited(call)


def walk_train() -> list[str]:
    """Two steps of `gshard train` on a hundred made-up sentences; inside of `jit.py`, see above."""
    from gshard.cli import main

    def run(*words: str) -> None:
        try:
            main(words)
        except SystemExit as end:
            if end.code:
                raise

    with tempfile.TemporaryDirectory() as folder:
        rows = [f"de\tdas ist Satz {n} von vielen\tthis is sentence {n}" for n in range(100)]
        text = Path(folder, "text.tsv")
        text.write_text("\n".join(rows) + "\n")
        corpus, out = f"{folder}/corpus", f"{folder}/run"

        run("data", "gather", "--out", corpus, "--tsv", f"train={text}", "--no-clean")
        settings = (
            "train.steps=2",
            "devices.count=2",
            "vocabulary.source_size=300",
            "vocabulary.target_size=300",
        )
        files = visited(lambda: run("train", "tiny", "--corpus", corpus, "--out", out, *settings))
    return [f for f in files if f.startswith(("mt/", "nn/")) or f in ("cli.py", "jit.py")]


PAGE = Path("docs/design.md")
_ROW = re.compile(r"\| (`[\w/]+\.py`(?:, `[\w/]+\.py`)*) \| (.*) \|\n")


def in_order(page: str, files: list[str]) -> str:
    """The page with the rows of its first table in the order of a walk, and one for each file.

    A row keeps its words; a file that has none gets the first sentence of its docstring.
    """
    begin = page.index("| file |")
    begin = page.index("\n", page.index("|---|", begin)) + 1
    end = page.index("\n\n", begin) + 1
    said: dict[str, str] = {}
    for names, words in _ROW.findall(page[begin:end]):
        first, *more = re.findall(r"`([\w/]+\.py)`", names)
        said[first] = f"| {names} | {words} |\n"
        said.update(dict.fromkeys(more, ""))
    rows = []
    for file in files:
        if file not in said:
            if file.startswith("rules/"):
                continue
            words = (ast.get_docstring(ast.parse((PACKAGE / file).read_text())) or "").split("\n")[
                0
            ]
            said[file] = f"| `{file}` | {words[:1].lower()}{words[1:].rstrip('.')} |\n"
        rows.append(said[file])
    return page[:begin] + "".join(rows) + page[end:]


def main() -> None:
    """Print the walk."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("which", choices=("jit", "train"))
    parser.add_argument("--update", action="store_true", help="the rows of docs/design.md, for jit")
    given = parser.parse_args()
    import_all()
    files = {"jit": walk_jit, "train": walk_train}[given.which]()
    print(*files, sep="\n")
    if given.update:
        PAGE.write_text(in_order(PAGE.read_text(), files))


if __name__ == "__main__":
    main()
