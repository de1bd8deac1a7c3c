"""Layouts that `gshard.auto` finds, beside those of experts: one table from one run.

    python -m benchmarks.auto                 forecasts of the large programs on 8 H100s
    python -m benchmarks.auto --measure       and values and step times of small ones, on 8 CPUs
    python -m benchmarks.auto --only resnet,moe   some of them
    python -m benchmarks.auto --jobs 14       searches in so many processes; steps are timed after
    python -m benchmarks.auto --out docs/results/auto.md

Each program gets no annotations, and is chosen a layout for; the same program with the annotations
of experts (`benchmarks.auto_cases`) is lowered beside it. Time and bytes are the forecast of the
lowered programs. For `--measure` a layout of the small program is found and run; its values are
compared with those of the program without partitioning.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import gshard
from benchmarks.auto_cases import CASES, Case
from examples.recipes.recipe import D
from gshard.autosharding.layout.annotations import as_text

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
    began = time.process_time()
    layout = gshard.auto(
        case.fn, *case.arguments, devices=D, hardware=hardware, memory=limit, seconds=seconds
    )
    took = time.process_time() - began
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


def searched(name: str, hardware: str, seconds: float, small: bool) -> tuple[Row, str]:
    """The row of a case, and the layout of its small version as JSON, if that is wanted."""
    make = next(make for make in CASES if make.__name__ == name)
    found = row(make(False), hardware, seconds)
    if not small:
        return found, ""
    case = make(True)
    layout = gshard.auto(case.fn, *case.arguments, devices=D, hardware="cpu", seconds=seconds / 2)
    return found, as_text(layout)


def measured(case: Case, expert: str, layout: gshard.Layout) -> dict[str, Any]:
    """Whether the values are those of the program, and the median step times of both layouts."""
    arguments = jax.tree.map(_drawn, case.arguments)
    programs = [
        gshard.jit(case.fn, annotations=layout, hardware="cpu").lower(*arguments).compile(),
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
        "than the bound. Annotated are arguments + tensors inside. Seconds are the processor",
        "time that it took to find the layout.",
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


def _pool(jobs: int) -> concurrent.futures.Executor:
    """Processes that search, each with devices of its own."""
    spawn = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(jobs, spawn, _begin, max_tasks_per_child=1)


def _begin() -> None:
    jax.config.update("jax_num_cpu_devices", D)


def _read(text: str) -> gshard.Layout:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(text)
        file.flush()
        return gshard.Layout.load(file.name)


def main() -> None:
    """Search, measure where that is asked for, and print the page."""
    jax.config.update("jax_num_cpu_devices", D)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="parts of names of cases, with commas between")
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each layout")
    parser.add_argument("--measure", action="store_true", help="values and step times too")
    parser.add_argument("--jobs", type=int, default=1, help="layouts that are searched at a time")
    parser.add_argument("--keep", type=Path, help="rows found before, and where to keep new ones")
    parser.add_argument("--out", type=Path, help="write the table here")
    options = parser.parse_args()
    makers = {make.__name__: make for make in CASES}
    known = json.loads(options.keep.read_text()) if options.keep and options.keep.exists() else {}
    parts = options.only.split(",")
    names = [name for name in makers if any(part in name for part in parts) and name not in known]
    given = options.hardware, options.seconds, options.measure
    with _pool(options.jobs) as pool:
        running = {name: pool.submit(searched, name, *given) for name in names}
    for name in names:
        found, text = running[name].result()
        if options.measure:
            more = measured(makers[name](True), found.expert, _read(text))
            found = dataclasses.replace(found, **more)
        print(found.markdown(options.measure), file=sys.stderr, flush=True)
        known[name] = dataclasses.asdict(found)
        if options.keep:
            options.keep.write_text(json.dumps(known, indent=1))
    rows = [Row(**known[name]) for name in makers if name in known]
    if not rows:
        parser.error(f"--only is {options.only!r}; the cases are {', '.join(makers)}")
    page = table(rows, options.measure, options.hardware)
    print(page)
    if options.out:
        options.out.write_text(page)


if __name__ == "__main__":
    main()
