"""`python -m tools.walk jit` and `python -m tools.walk train`: the files in the order of a call.

A small program is run, and each file of gshard is printed when a function of it is called for the
first time: the order in which to read them. The reading orders of docs/design.md follow it.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
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


def main() -> None:
    """Print the walk."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("which", choices=("jit", "train"))
    walk = {"jit": walk_jit, "train": walk_train}[parser.parse_args().which]
    import_all()
    print(*walk(), sep="\n")


if __name__ == "__main__":
    main()
