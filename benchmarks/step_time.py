"""Step times of gshard beside XLA's partitioner, on every program and every recipe.

    python -m benchmarks.step_time                  8 virtual devices in one process
    python -m benchmarks.step_time --processes 4    the same 8 in 4 processes, on loopback with Gloo
    python -m benchmarks.step_time --show A.json B.json --markdown --plot F.svg

In one process a byte is a memcpy and arithmetic is dear; between processes it goes through a
socket. Programs are those of `benchmarks.programs` and `examples/recipes`, small, dispatch
included. A row is printed and written to the JSON file as soon as it is measured, and a run goes
on where an earlier one with the same file stopped. gshard and XLA take turns in one process; the
median of their ratios stands in the table with its interval (`benchmarks.paired`): above 1 is
slower than XLA. So does the ratio of processor times, of all processes together, which shows who
does more work however busy the machine is.

By default gshard plans for accelerators though it runs on a CPU, which stands for them; `hardware`
tells it what it runs on. Both plans are in the table, once where they are the same.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

import gshard
from benchmarks.paired import Times, interval, median_ratio, timed
from benchmarks.programs import D, programs
from benchmarks.recipes import recipes
from benchmarks.step_table import Row, cells, markdown, plot, summary
from examples.recipes.transformer import SMALL
from gshard.mt.launch.local import free_port

SECONDS = 4.0  # for the rounds of a row
LIMIT = 240  # seconds without a row after which processes are taken for stuck


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


def measure(name: str, fn: Callable, args: tuple[Any, ...], hardware: str, seconds: float) -> Row:
    """A row: both plans of gshard and XLA's program, which take turns."""
    plans: dict[str, dict[str, Any]] = {
        "gshard": {"hardware": hardware},
        "default": {},
        "xla": {"partitioner": "xla"},
    }
    lowered = {plan: gshard.jit(fn, **options).lower(*args) for plan, options in plans.items()}
    if lowered["default"].as_text() == lowered["gshard"].as_text():
        del lowered["default"]
    runs, sent = {}, {}
    for plan, program in lowered.items():
        compiled = program.compile()
        placed = compiled.place(*args)
        runs[plan] = lambda compiled=compiled, placed=placed: compiled(*placed)
        jax.block_until_ready(runs[plan]())
        sent[plan] = sum(c.total_bytes for c in program.collectives)
    clock, processor = timed(runs, seconds, agreed_by_all)
    return row_of(name, clock, _of_all(processor), sent)


def row_of(name: str, clock: Times, processor: Times, sent: dict[str, int]) -> Row:
    """The figures of a row; a default plan that is the other one has the same."""
    found: Row = {"name": name, "rounds": len(clock["xla"]), "bytes": dict(sent)}
    found["ms"] = {plan: 1e3 * float(np.median(times)) for plan, times in clock.items()}
    for kind, times in (("ratio", clock), ("processor", processor)):
        ours = [plan for plan in times if plan != "xla"]
        found[kind] = {plan: median_ratio(times, plan, "xla") for plan in ours}
    found["interval"] = {plan: interval(clock, plan, "xla") for plan in clock if plan != "xla"}
    for key in ("bytes", "ms", "ratio", "processor", "interval"):
        found[key].setdefault("default", found[key]["gshard"])
    return found


def _of_all(processor: Times) -> Times:
    """Processor times of this process, summed over all of them."""
    if jax.process_count() == 1:
        return processor
    everyone = multihost_utils.process_allgather(np.array(list(processor.values())))
    return dict(zip(processor, everyone.sum(0).tolist(), strict=True))


def agreed_by_all(numbers: list[int]) -> Sequence[int]:
    """What the first process says, in all of them."""
    if jax.process_count() == 1:
        return numbers
    return multihost_utils.broadcast_one_to_all(np.array(numbers)).tolist()


def run_rows(names: Sequence[str], options: argparse.Namespace) -> None:
    """Measure the rows of these names in this process, and write each down."""
    wanted = {name: rest for name, *rest in steps() if name in names}
    for name in names:
        try:
            row = measure(name, *wanted[name], options.hardware, options.seconds)
        except Exception as error:  # one program that fails is a row that says so
            row = {"name": name, "error": f"{type(error).__name__}: {str(error)[:300]}"}
        if jax.process_index() == 0:
            keep(options.json, row)
            print(" | ".join(cells(row)), flush=True)


def keep(path: Path, row: Row) -> None:
    """Add a row to the file, which is whole at every moment."""
    rows = {r["name"]: r for r in known(path)} | {row["name"]: row}
    part = path.with_suffix(".part")
    part.write_text(json.dumps(list(rows.values()), indent=1) + "\n")
    part.replace(path)


def known(path: Path) -> list[Row]:
    """The rows that were measured before."""
    return json.loads(path.read_text()) if path.exists() else []


def measured(path: Path) -> set[str]:
    """The names of those rows that are no errors."""
    return {row["name"] for row in known(path) if "error" not in row}


def in_processes(names: list[str], options: argparse.Namespace) -> None:
    """Measure the rows in several processes; a program that they do not get past is an error."""
    while names:
        running = start_processes(names, options)
        try:
            wait_for(running[0], options.json)
        finally:
            for process in running:
                process.kill()
                process.wait()
        done = measured(options.json)
        names = [name for name in names if name not in done]
        if names:
            keep(options.json, {"name": names[0], "error": "the processes stopped, or got stuck"})
            names = names[1:]


def wait_for(process: subprocess.Popen, path: Path) -> None:
    """Until the process ends, or has written no row for too long."""
    rows = -1
    while process.poll() is None and rows != (rows := len(known(path))):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LIMIT)


def start_processes(names: list[str], options: argparse.Namespace) -> list[subprocess.Popen]:
    """The processes, each with its share of the devices."""
    port = free_port("127.0.0.1")
    given = ["--json", str(options.json), "--hardware", options.hardware]
    given += ["--seconds", str(options.seconds), "--processes", str(options.processes)]
    command = [sys.executable, "-m", "benchmarks.step_time", *given, "--rows", json.dumps(names)]
    return [
        subprocess.Popen([*command, "--member", f"{port}:{number}"])
        for number in range(options.processes)
    ]


def join(member: str, count: int) -> None:
    """Become one of the processes."""
    port, number = member.split(":")
    jax.config.update("jax_num_cpu_devices", D // count)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Busy machines miss heartbeats; who is stuck is found out by the rows that do not come.
    busy = {"heartbeat_timeout_seconds": 10 * LIMIT}
    jax.distributed.initialize(f"127.0.0.1:{port}", count, int(number), **busy)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, choices=(1, 2, 4, 8), default=1)
    parser.add_argument("--json", type=Path, help="rows in it are not measured again")
    parser.add_argument("--only", default="", help="programs whose name contains this")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of rounds for a row")
    parser.add_argument("--hardware", default="cpu", help="that gshard plans for")
    parser.add_argument("--show", type=Path, nargs="+", help="files of rows: measure nothing")
    parser.add_argument("--markdown", action="store_true", help="print the tables for the docs")
    parser.add_argument("--plot", type=Path, help="draw bytes and time against XLA's")
    parser.add_argument("--rows", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--member", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.json = options.json or Path(f"step_time_{options.processes}.json")
    return options


def main() -> None:
    options = parsed()
    if options.member:
        join(options.member, options.processes)
        run_rows(options.rows, options)
        return
    if not options.show:
        jax.config.update("jax_num_cpu_devices", D)
        done = measured(options.json)
        names = [name for name, *_ in steps() if options.only in name and name not in done]
        (in_processes if options.processes > 1 else run_rows)(names, options)
    tables = [(path.stem, known(path)) for path in options.show or [options.json]]
    for _, rows in tables:
        print(markdown(rows) if options.markdown else summary(rows))
    if options.plot:
        plot(tables, options.plot)


if __name__ == "__main__":
    main()
