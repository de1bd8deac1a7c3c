"""gshard's partitioner beside XLA's, on the same annotations, in one run.

    python -m benchmarks.partition            the table
    python -m benchmarks.partition --json F   and its figures in a file
    python -m benchmarks.partition --markdown the table of docs/results/partition.md
    python -m benchmarks.partition --gpu      what XLA's compiler for GPUs sends, on one GPU

Bytes are what one device sends (exact, read off both programs). Times are medians of runs that
alternate between the two, on 8 virtual devices of this machine's CPU: compare them as ratios. XLA's
program for accelerators is counted from that for CPUs (`explanation.hlo`); `--gpu` compiles it, for
one GPU and seven that XLA makes up, and prints both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import gshard
from benchmarks.many_gpus import ALONE
from benchmarks.programs import D, Program, programs
from gshard.explanation.hlo import HloProgram

RUNS = 9


@dataclass(frozen=True)
class Figures:
    """What one partitioner made of one program."""

    bytes: int
    collectives: str
    right: bool
    compile_s: float
    step_ms: float
    on_accelerators: int  # bytes that accelerators send, whose compiler makes ReduceScatters


def sent(text: str, accelerator: bool = False) -> int:
    """Bytes that one device sends in a compiled program."""
    return sum(c.total_bytes for c, _ in HloProgram(text, D, accelerator).collectives())


def on_gpu(only: str) -> None:
    """Print KB that one of a GPU and seven mock ones sends in XLA's programs for them."""
    os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), ALONE))
    jax.config.update("jax_mock_gpu_topology", f"1x{D}x1")  # before JAX looks for devices
    print("| program | XLA on GPUs |", "|---|---:|", sep="\n")
    for program in (p for p in programs() if only in p.name):
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), program.args)
        lowered = gshard.jit(program.fn, partitioner="xla").lower(*shapes)
        text = lowered.compile().as_text()
        print(f"| {program.name} | {kilobytes(sent(text))} |", flush=True)


def measure(program: Program) -> dict[str, Figures]:
    wanted = jax.jit(program.fn)(*program.args)
    lowered, compiled, seconds, times = {}, {}, {}, {}
    for name in ("gshard", "xla"):
        start = time.perf_counter()
        lowered[name] = gshard.jit(program.fn, partitioner=name).lower(*program.args)
        compiled[name] = lowered[name].compile()
        seconds[name] = time.perf_counter() - start
        times[name] = []
    placed = {name: run.place(*program.args) for name, run in compiled.items()}
    for _ in range(RUNS if program.timed else 1):
        for name, run in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(run(*placed[name]))
            times[name].append(time.perf_counter() - start)
    return {
        name: Figures(
            sum(c.total_bytes for c in lowered[name].collectives),
            summary(lowered[name].collectives),
            equal(compiled[name](*placed[name]), wanted),
            seconds[name],
            1000 * statistics.median(times[name]),
            sent(compiled[name].as_text(), accelerator=True),
        )
        for name in compiled
    }


def summary(collectives) -> str:
    counts: dict[str, int] = {}
    for c in collectives:
        if c.bytes:
            counts[c.kind] = counts.get(c.kind, 0) + c.count
    return (
        ", ".join(f"{n} {kind.replace('_', '-')}" for kind, n in sorted(counts.items())) or "none"
    )


def equal(got, wanted) -> bool:
    return all(
        np.allclose(np.asarray(a), np.asarray(b), rtol=1e-3, atol=1e-4)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    )


def markdown(found: dict) -> list[str]:
    """The table of docs/results/partition.md."""
    heads = "| program | needed | gshard | XLA | XLA on accelerators | step time |"
    lines = [heads, "|---|---:|---:|---:|---:|---:|"]
    timed = {p.name for p in programs() if p.timed}
    for name, row in found.items():
        ours, theirs = row["gshard"], row["xla"]
        both = [
            kilobytes(r["bytes"]) + ("" if r["right"] else ", **wrong**") for r in (ours, theirs)
        ]
        ratio = f"{ours['step_ms'] / theirs['step_ms']:.2f}" if name in timed else ""
        there = kilobytes(theirs["on_accelerators"])
        cells = [name, kilobytes(row["needed"]), *both, there, ratio]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def kilobytes(n: int) -> str:
    return f"{n / 1000:,.1f}"


def main() -> None:
    jax.config.update("jax_num_cpu_devices", D)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--only", default="", help="programs whose name contains this")
    parser.add_argument(
        "--markdown", action="store_true", help="print the table of docs/results/partition.md"
    )
    parser.add_argument("--gpu", action="store_true", help="compile XLA's programs for GPUs")
    options = parser.parse_args()
    if options.gpu:
        on_gpu(options.only)
        return
    console = Console(width=180)
    chosen = [p for p in programs() if options.only in p.name]
    table = Table(
        title=f"KB that one of {D} devices sends; ratios of times, below 1 is faster than XLA"
    )
    for column in (
        "program",
        "needed",
        "gshard",
        "XLA",
        "gshard's collectives",
        "XLA's",
        "step",
        "compile",
    ):
        table.add_column(
            column, justify="left" if "'s" in column or column == "program" else "right"
        )
    found = {}
    for program in track(chosen, console=console, transient=True):
        figures = measure(program)
        ours, theirs = figures["gshard"], figures["xla"]
        found[program.name] = {"needed": program.needed} | {
            k: asdict(v) for k, v in figures.items()
        }
        table.add_row(
            program.name,
            kilobytes(program.needed),
            kilobytes(ours.bytes) + ("" if ours.right else " WRONG"),
            kilobytes(theirs.bytes) + ("" if theirs.right else " WRONG"),
            ours.collectives,
            theirs.collectives,
            f"{ours.step_ms / theirs.step_ms:.2f}" if program.timed else "",
            f"{ours.compile_s / theirs.compile_s:.2f}",
        )
    if options.markdown:
        print(*markdown(found), sep="\n")
    else:
        console.print(table)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
