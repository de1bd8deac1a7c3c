"""Step times where a byte is a memcpy: gshard beside XLA's partitioner on 8 virtual devices.

    python -m benchmarks.step_time              the table
    python -m benchmarks.step_time --json F     and its figures in a file
    python -m benchmarks.step_time --markdown   the table for the docs

Every program of `benchmarks.programs` and every recipe of `examples/recipes`, small, on 8 devices
of this CPU in one process, dispatch included. Runs alternate. The least time of each stands in the
table, so that it depends little on what else runs; ratios above 1 are slower than XLA.

By default gshard plans for accelerators, where arithmetic is cheap beside bytes, though it runs on
a CPU: `hardware="cpu"` tells it. Both plans stand in the table.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import gshard
from benchmarks.programs import D, programs
from benchmarks.recipes import recipes
from examples.recipes.transformer import SMALL

RUNS = 25
GOAL = 1.05
PLANS: dict[str, dict[str, Any]] = {
    "cpu": {"hardware": "cpu"},
    "default": {},
    "xla": {"partitioner": "xla"},
}


def steps() -> Iterator[tuple[str, Callable, tuple[Any, ...]]]:
    """The names, the functions and arguments for them."""
    rng = np.random.default_rng(0)

    def draw(x: Any) -> np.ndarray:
        if np.issubdtype(x.dtype, np.integer):
            return rng.integers(0, 8, x.shape).astype(x.dtype)
        return (rng.normal(size=x.shape) / 8).astype(x.dtype)

    for program in programs():
        yield program.name, program.fn, program.args
    for recipe in recipes(SMALL):
        yield recipe.name, recipe.step, jax.tree.map(draw, recipe.arguments)


def least_times(fn: Callable, args: tuple[Any, ...], runs: int) -> dict[str, float]:
    """The least milliseconds of a step under each plan; they take turns."""
    compiled = {
        name: gshard.jit(fn, **options).lower(*args).compile() for name, options in PLANS.items()
    }
    placed = {name: program.place(*args) for name, program in compiled.items()}
    least = dict.fromkeys(compiled, float("inf"))
    for _ in range(runs):
        for name, program in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(program(*placed[name]))
            least[name] = min(least[name], 1000 * (time.perf_counter() - start))
    return least


def told(name: str, least: dict[str, float]) -> tuple[str, ...]:
    """A row of the table."""
    ratios = [f"{least[plan] / least['xla']:.2f}" for plan in ("cpu", "default")]
    return name, f"{least['xla']:.2f}", f"{least['cpu']:.2f}", *ratios


def main() -> None:
    jax.config.update("jax_num_cpu_devices", D)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--only", default="", help="programs whose name contains this")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--markdown", action="store_true", help="print the table for the docs")
    options = parser.parse_args()
    console = Console(width=100)
    chosen = [step for step in steps() if options.only in step[0]]
    found = {
        name: least_times(fn, args, options.runs)
        for name, fn, args in track(chosen, console=console, transient=True)
    }
    rows = [told(name, least) for name, least in found.items()]
    if options.markdown:
        print("| program | XLA, ms | gshard, ms | over XLA | planned for accelerators |")
        print("|---|---:|---:|---:|---:|")
        print(*(f"| {' | '.join(row)} |" for row in rows), sep="\n")
    else:
        above = sum(float(row[3]) > GOAL for row in rows)
        table = Table(title=f"milliseconds of a step; {above} of {len(rows)} ratios above {GOAL}")
        for column in ("program", "XLA", "gshard", "over XLA", "planned for accelerators"):
            table.add_column(column, justify="left" if column == "program" else "right")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
