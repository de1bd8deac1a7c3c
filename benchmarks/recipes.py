"""The usual ways to train on many devices: what gshard, XLA and an expert send, in one run.

    python -m benchmarks.recipes             the table, for a small and a large model
    python -m benchmarks.recipes --markdown  the table for docs/howto/parallelism.md
    python -m benchmarks.recipes --steps     and the step times of the small one
    python -m benchmarks.recipes --hardware h200 --no-xla    as gshard plans for other machines

Bytes are what one of 8 devices sends in a training step (read off both programs), as gshard plans
for accelerators, for which CPUs stand. An expert's come from the formula beside each recipe in
examples/recipes. The large model is lowered, never run. Step times are those of the plan for the
devices on which they are measured: `hardware` tells gshard that it runs on a CPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import gshard
from examples.recipes.recipe import D, Recipe
from examples.recipes.transformer import LARGE, SMALL, Size
from gshard import forecast

NAMES = (
    "data_parallel", "gradient_accumulation", "zero1", "fsdp", "hsdp", "tensor_parallel",
    "sequence_parallel", "two_dims", "experts", "dropless", "context_parallel", "spatial",
    "fourier", "pipeline", "parallel_block", "muon", "graph_network",
    "qlora", "unet", "experts_two_dims", "kalman", "stencils",
    "ulysses", "embedding_bag", "pairs", "matrix_optimizers",
    "expert_fsdp", "contrastive", "selective_scan",
)  # fmt: skip
RUNS = 15


def recipes(size: Size) -> list[Recipe]:
    """All recipes, for a model of this size."""
    modules = [importlib.import_module(f"examples.recipes.{name}") for name in NAMES]
    return [recipe for module in modules for recipe in module.recipes(size)]


def measure(recipe: Recipe, xla: bool, steps: bool, hardware: str | None = None) -> dict[str, Any]:
    """Bytes of both partitioners, and the ratio of their step times."""
    ours = gshard.jit(recipe.step, hardware=hardware).lower(*recipe.arguments)
    found: dict[str, Any] = {
        "expert": recipe.expert,
        "gshard": recipe.sent(ours.collectives),
        "collectives": summary(ours.collectives),
    }
    if xla:
        theirs = gshard.jit(recipe.step, partitioner="xla").lower(*recipe.arguments)
        found["xla"] = recipe.sent(theirs.collectives)
        if steps:
            here = gshard.jit(recipe.step, hardware=hardware or forecast.present())
            timed = here.lower(*recipe.arguments)
            found |= ratios_of_times(recipe, [timed.compile(), theirs.compile()])
    return found


def ratios_of_times(recipe: Recipe, compiled: list[Any]) -> dict[str, float]:
    """The median step time of the first program over that of the second; runs alternate.

    By the clock, and in processor time: all devices share the cores, so that the clock also
    measures who happened to wait for whom, and what else runs on the machine.
    """
    rng = np.random.default_rng(0)

    def draw(x):
        if np.issubdtype(x.dtype, np.integer):
            return rng.integers(0, 8, x.shape).astype(x.dtype)
        return (rng.normal(size=x.shape) / 8).astype(x.dtype)

    arguments = jax.tree.map(draw, recipe.arguments)
    placed = [program.place(*arguments) for program in compiled]
    clocks = {"step": time.perf_counter, "processor": time.process_time}
    taken: dict[str, list[list[float]]] = {name: [[], []] for name in clocks}
    for _ in range(RUNS):
        for number, (program, own) in enumerate(zip(compiled, placed, strict=True)):
            starts = {name: clock() for name, clock in clocks.items()}
            jax.block_until_ready(program(*own))
            for name, clock in clocks.items():
                taken[name][number].append(clock() - starts[name])
    return {
        name: statistics.median(ours) / statistics.median(theirs)
        for name, (ours, theirs) in taken.items()
    }


def summary(collectives) -> str:
    """How many of each kind."""
    counts: dict[str, int] = {}
    for c in collectives:
        if c.total_bytes:
            counts[c.kind] = counts.get(c.kind, 0) + c.count
    return ", ".join(f"{n} {kind.replace('_', '-')}" for kind, n in sorted(counts.items()))


def markdown(found: dict[str, dict[str, Any]]) -> list[str]:
    """The table as it stands in the docs."""
    timed = any("step" in row for row in found.values())
    lines = [
        "| recipe | by hand | gshard | XLA |"
        + " step | processor |" * timed
        + " gshard's collectives |",
        "|---|---:|---:|---:|" + "---:|---:|" * timed + "---|",
    ]
    for name, row in found.items():
        hand = row["expert"]
        theirs = f"{row['xla'] / hand:.2f}" if "xla" in row else ""
        step = f"| {row['step']:.2f} | {row['processor']:.2f} " if timed else ""
        lines.append(
            f"| {name} | {hand / 1e6:,.2f} MB | {row['gshard'] / hand:.2f} | {theirs} {step}"
            f"| {row['collectives']} |"
        )
    return lines


def main() -> None:
    jax.config.update("jax_num_cpu_devices", D)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--only", default="", help="recipes whose name contains this")
    parser.add_argument("--size", choices=("small", "large", "both"), default="both")
    parser.add_argument("--no-xla", action="store_true", help="gshard alone, which is quick")
    parser.add_argument(
        "--hardware", choices=forecast.known(), help="the machine that gshard plans for"
    )
    parser.add_argument("--steps", action="store_true", help="step times of the small model too")
    parser.add_argument("--markdown", action="store_true", help="print the table for the docs")
    options = parser.parse_args()
    console = Console(width=170)
    figures = {}
    for name, size in (("small", SMALL), ("large", LARGE)):
        if options.size not in (name, "both"):
            continue
        chosen = [r for r in recipes(size) if options.only in r.name]
        steps = options.steps and name == "small"
        rows = {
            r.name: measure(r, not options.no_xla, steps, options.hardware)
            for r in track(chosen, console=console, transient=True)
        }
        figures[name] = rows
        if options.markdown:
            print(f"{name}\n", *markdown(rows), sep="\n")
        else:
            console.print(as_table(name, rows))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


def as_table(name: str, rows: dict[str, dict[str, Any]]) -> Table:
    """The figures, for a terminal."""
    table = Table(title=f"{name} model: bytes that one of {D} devices sends, over an expert's")
    table.add_column("recipe")
    for column in ("by hand, MB", "gshard", "XLA", "step time", "processor"):
        table.add_column(column, justify="right")
    table.add_column("gshard's collectives")
    for recipe, row in rows.items():
        table.add_row(
            recipe,
            f"{row['expert'] / 1e6:,.2f}",
            f"{row['gshard'] / row['expert']:.2f}",
            f"{row['xla'] / row['expert']:.2f}" if "xla" in row else "",
            f"{row['step']:.2f}" if "step" in row else "",
            f"{row['processor']:.2f}" if "processor" in row else "",
            row["collectives"],
        )
    return table


if __name__ == "__main__":
    main()
