"""Layouts that `gshard.auto` finds, beside those of experts: one table from one run.

    python -m benchmarks.auto                 forecasts of the large programs on 8 H100s
    python -m benchmarks.auto --measure       and values and step times of small ones, on 8 CPUs
    python -m benchmarks.auto --only resnet,moe   some of them
    python -m benchmarks.auto --out docs/results/auto.md

Each program gets no annotations, and is chosen a layout for; the same program with the annotations
of experts (`benchmarks.auto_cases`) is lowered beside it. Time and bytes are the forecast of the
lowered programs. For `--measure` a layout of the small program is found and run; its values are
compared with those of the program without partitioning.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import gshard
from benchmarks.auto_cases import CASES, Case
from examples.recipes.recipe import D

RUNS = 15


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table: times in seconds, bytes that a device sends."""

    name: str
    expert: str
    expert_seconds: float
    expert_bytes: int
    seconds: float
    sent: int
    bound: float
    mesh: str
    annotated: str
    found_in: float
    values: str = ""
    step: float = 0.0

    @property
    def ratio(self) -> float:
        """Our forecast over the best expert's."""
        return self.seconds / self.expert_seconds

    def markdown(self, timed: bool) -> str:
        """The row."""
        measured = f" {self.values} | {self.step:.2f} |" if timed else ""
        return (
            f"| {self.name} | {self.expert} | {_ms(self.expert_seconds)} | {_ms(self.seconds)} | "
            f"{self.ratio:.3f} | {self.sent / max(self.expert_bytes, 1):.2f} | {_ms(self.bound)} | "
            f"{self.mesh} | {self.annotated} | {self.found_in:.0f} |{measured}"
        )


def _sent(lowered: Any) -> int:
    return sum(c.total_bytes for c in lowered.collectives)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def row(case: Case, hardware: str, seconds: float) -> Row:
    """A layout for a case, and the best of its experts that fits where the layout has to."""
    lowered = {
        name: gshard.jit(fn, devices=D, hardware=hardware).lower(*case.arguments)
        for name, fn in case.experts.items()
    }
    forecasts = {name: each.forecast() for name, each in lowered.items()}
    limit = None
    if case.memory_of:
        limit = int(1.02 * forecasts[case.memory_of].memory_bytes)
    fitting = {n: f for n, f in forecasts.items() if limit is None or f.memory_bytes <= limit}
    best = min(fitting, key=lambda n: fitting[n].serial_seconds)
    began = time.monotonic()
    layout = gshard.auto(
        case.fn, *case.arguments, devices=D, hardware=hardware, memory=limit, seconds=seconds
    )
    took = time.monotonic() - began
    return Row(
        case.name,
        best,
        fitting[best].serial_seconds,
        _sent(lowered[best]),
        layout.seconds,
        _sent(layout.lowered),
        layout.bound,
        " x ".join(map(str, layout.mesh.values())),
        f"{len(layout.annotations)} + {len(layout.inside)}",
        took,
    )


def measured(case: Case, expert: str, seconds: float) -> dict[str, Any]:
    """Whether the values are those of the program, and the median step times of both layouts."""
    layout = gshard.auto(case.fn, *case.arguments, devices=D, hardware="cpu", seconds=seconds)
    arguments = jax.tree.map(_drawn, case.arguments)
    programs = [
        layout.jit().lower(*arguments).compile(),
        gshard.jit(case.experts[expert], hardware="cpu").lower(*arguments).compile(),
    ]
    placed = [program.place(*arguments) for program in programs]
    wanted, got = jax.jit(case.fn)(*arguments), programs[0](*placed[0])
    equal = all(
        np.allclose(a, b, rtol=1e-3, atol=1e-4)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    )
    taken: list[list[float]] = [[], []]
    for _ in range(RUNS):
        for program, own, times in zip(programs, placed, taken, strict=True):
            began = time.perf_counter()
            jax.block_until_ready(program(*own))
            times.append(time.perf_counter() - began)
    ours, theirs = map(statistics.median, taken)
    return {"values": "equal" if equal else "DIFFERENT", "step": ours / theirs}


def _drawn(struct: Any) -> Any:
    """Positive numbers: second moments have roots."""
    rng = np.random.default_rng(0)
    if np.issubdtype(struct.dtype, np.integer):
        return rng.integers(0, 8, struct.shape).astype(struct.dtype)
    return rng.uniform(0.0, 0.25, struct.shape).astype(struct.dtype)


def table(rows: list[Row], timed: bool, hardware: str) -> str:
    """The page."""
    head = (
        "| program | best expert | its ms | ours | ratio | bytes | bound | mesh | annotations | s |"
    )
    rule = "|---|---|---:|---:|---:|---:|---:|---|---|---:|"
    if timed:
        head, rule = head + " values | step |", rule + "---|---:|"
    better = sum(r.ratio < 1 for r in rows)
    worst = max(r.ratio for r in rows)
    lines = [
        "# Annotations chosen by gshard compared with those of experts",
        "",
        f"8 x {hardware}. Milliseconds are the forecast of the lowered program; the ratio is ours",
        "over the best expert's, and so are the bytes that a device sends. No layout takes less",
        "than the bound. Annotated are arguments + tensors inside. The last column is how",
        "many seconds it took to find the layout, on 2 cores.",
        *(
            [
                "Values are those of a small version of the program on 8 virtual devices, against",
                "the program without partitioning; step is its measured step time over the",
                "expert's, the median of alternating runs. Their layouts are for CPUs and are",
                "searched for half of the time.",
            ]
            if timed
            else []
        ),
        "",
        head,
        rule,
        *(r.markdown(timed) for r in rows),
        "",
        f"{better} of {len(rows)} are faster than the best expert; the largest ratio is "
        f"{worst:.3f}.",
        "",
        f"    python -m benchmarks.auto{' --measure' if timed else ''} --out docs/results/auto.md",
        "",
        "prints this page; experts and programs are in `benchmarks/auto_cases.py`.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    jax.config.update("jax_num_cpu_devices", D)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="parts of names of cases, with commas between")
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each layout")
    parser.add_argument("--measure", action="store_true", help="values and step times too")
    parser.add_argument("--keep", type=Path, help="rows found before, and where to keep new ones")
    parser.add_argument("--out", type=Path, help="write the table here")
    options = parser.parse_args()
    known = json.loads(options.keep.read_text()) if options.keep and options.keep.exists() else {}
    for make in CASES:
        wanted = any(part in make.__name__ for part in options.only.split(","))
        if not wanted or make.__name__ in known:
            continue
        found = row(make(False), options.hardware, options.seconds)
        if options.measure:
            more = measured(make(True), found.expert, options.seconds / 2)
            found = dataclasses.replace(found, **more)
        print(found.markdown(options.measure), file=sys.stderr, flush=True)
        known[make.__name__] = dataclasses.asdict(found)
        if options.keep:
            options.keep.write_text(json.dumps(known, indent=1))
    rows = [Row(**known[make.__name__]) for make in CASES if make.__name__ in known]
    if not rows:
        names = ", ".join(make.__name__ for make in CASES)
        parser.error(f"--only is {options.only!r}; the cases are {names}")
    page = table(rows, options.measure, options.hardware)
    print(page)
    if options.out:
        options.out.write_text(page)


if __name__ == "__main__":
    main()
