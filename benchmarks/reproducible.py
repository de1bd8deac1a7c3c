"""The same bits on any devices: what `reproducible=True` promises, tried, and what it costs.

    python -m benchmarks.reproducible rows.json                       all rows, one after the other
    python -m benchmarks.reproducible rows.json --jobs 8 --minutes 9  8 at a time; run it again for
                                                                      the rows that are missing
    python -m benchmarks.reproducible rows.json --only data --devices 1,8 --steps 2
    python -m benchmarks.reproducible rows.json --times               step times, too
    python -m benchmarks.reproducible rows.json --times --size large  of larger models
    python -m benchmarks.reproducible rows.json --show                the tables of docs/results
    python -m benchmarks.reproducible rows.json --kernels             products of this CPU or GPU

A row has a hash of the bits of all results of all steps; the tables compare it with that of the
same program on one device, without its annotations. Bytes are what a device sends in a step, times
are medians of steps that alternate with those of the usual program. Every row is measured in a
process of its own, and rows with 4 processes in 4, which send over sockets. The rows of a few
programs come first, those of one device before others.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

import gshard
from benchmarks.reproducible_cases import FIRST, MOST, SIZES, Case, case_of, names, types_of
from benchmarks.reproducible_table import tables, verdict
from gshard.mt.launch.local import free_port
from gshard.reproducible.products import have_one_kernel, multiples, shared_multiple

COUNTS = (1, 8, 3, 6, 2, 4)  # in the order in which they are measured
PROCESSES = 4
TYPES = ("float32", "bfloat16")
RUNS = {"small": 15, "large": 7}  # of each program whose times are measured


@dataclass(frozen=True)
class Row:
    """What is measured by one process, or by several together."""

    program: str
    type: str
    devices: int
    processes: int = 1
    timed: bool = False
    size: str = "small"


def rows(
    only: str, types: list[str], counts: list[int], processes: bool, size: str = "small"
) -> list[Row]:
    """The rows of programs whose names contain `only`, the most telling ones first."""
    chosen = [n for n in names(size) if only in n]
    places = [(devices, 1) for devices in counts]
    places += [(MOST, PROCESSES)] if processes and MOST in counts else []
    found = []
    for group in ([n for n in chosen if n in FIRST], [n for n in chosen if n not in FIRST]):
        for devices, several in places:
            for dtype in types:
                members = [n for n in group if dtype in types_of(n)]
                found += [Row(program, dtype, devices, several, size=size) for program in members]
    return found


# ---------------------------------------------------------------- one row


def values_of(leaf: Any) -> np.ndarray:
    """The values of an array, which may be spread over processes."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    leaf = leaf.logical() if hasattr(leaf, "logical") else leaf
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        if not leaf.is_fully_replicated:
            leaf = multihost_utils.process_allgather(leaf, tiled=True)
        else:
            leaf = leaf.addressable_data(0)
    return np.asarray(leaf)


def digest(tree: Any) -> str:
    """A hash of the bits of all arrays in a tree, whose values are finite.

    A training that diverged would say nothing: all its values are equal, and the sign of a NaN
    depends on the instruction that made it.
    """
    found = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(tree):
        values = values_of(leaf)
        if jnp.issubdtype(values.dtype, jnp.inexact) and not np.isfinite(values).all():
            raise FloatingPointError(f"result {jax.tree_util.keystr(path)} is not finite")
        found.update(values.tobytes())
    return found.hexdigest()[:16]


def trained(compiled: Any, arguments: tuple[Any, ...], steps: int) -> str:
    """The bits of all results of `steps` steps.

    A result that is like an argument takes its place in the next step.
    """
    types = [jax.tree.map(jnp.shape, a) for a in arguments]
    bits = []
    for _ in range(steps):
        results = compiled(*arguments)
        bits.append(digest(results))
        parts = list(results) if isinstance(results, tuple | list) else [results]
        following = list(arguments)
        for part in parts:
            found = [i for i, t in enumerate(types) if t == jax.tree.map(jnp.shape, part)]
            if found:
                following[found[0]] = part
        arguments = tuple(following)
    return hashlib.sha256("".join(bits).encode()).hexdigest()[:16]


def lowered_with(case: Case, reproducible: bool) -> Any:
    """The program of a case, reproducible or as usual."""
    here = jax.devices()[: case.devices]
    return gshard.jit(case.step, devices=here, reproducible=reproducible).lower(*case.arguments)


def sent(lowered: Any) -> int:
    """The bytes that a device sends in a step."""
    return sum(c.total_bytes for c in lowered.collectives)


def bits_and_bytes(case: Case, steps: int) -> dict[str, Any]:
    """The bits of all steps, and the bytes of a step beside the usual program's."""
    lowered = lowered_with(case, reproducible=True)
    found = {"bytes": sent(lowered), "usual bytes": sent(lowered_with(case, reproducible=False))}
    return found | {"bits": trained(lowered.compile(), case.arguments, steps)}


def timed(case: Case, runs: int) -> dict[str, Any]:
    """The median times of a step, by the clock and of processors, beside the usual program's."""
    compiled = [lowered_with(case, which).compile() for which in (True, False)]
    placed = [program.place(*case.arguments) for program in compiled]
    clock: list[list[float]] = [[], []]
    processor: list[list[float]] = [[], []]
    for turn in range(runs + 2):
        for i, (program, arguments) in enumerate(zip(compiled, placed, strict=True)):
            start = time.perf_counter(), time.process_time()
            jax.block_until_ready(program(*arguments))
            if turn > 1:
                clock[i].append(time.perf_counter() - start[0])
                processor[i].append(time.process_time() - start[1])
    times, usual = map(statistics.median, clock)
    busy, usual_busy = map(statistics.median, processor)
    return {"time": times, "usual time": usual, "processor x usual": busy / max(usual_busy, 1e-9)}


def machine() -> str:
    """What bits depend on beside the program: processor, JAX, and the kernels of products."""
    multiple = shared_multiple()
    kernels = f"products padded to {multiple}" if multiple else "products written out"
    kind = jax.devices()[0].device_kind
    name = platform.machine() if kind == "cpu" else kind
    return f"{name}, JAX {jax.__version__}, {kernels}"


def run_row(row: Row, steps: int, member: str) -> None:
    """Measure a row, as one of its processes, and print it."""
    jax.config.update("jax_num_cpu_devices", row.devices // row.processes)
    if member:
        port, number = member.split(":")
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        address = f"127.0.0.1:{port}"
        jax.distributed.initialize(
            address, row.processes, int(number), heartbeat_timeout_seconds=3600
        )
    case = case_of(row.program, row.type, row.devices, row.size)
    found = timed(case, RUNS[row.size]) if row.timed else bits_and_bytes(case, steps)
    if jax.process_index() == 0:
        print(json.dumps(asdict(row) | {"steps": steps, "machine": machine()} | found))


# ---------------------------------------------------------------- all rows


def kept_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, which has one in each line; rows are small where no size is given."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [{"size": "small"} | json.loads(line) for line in lines]


def measured_in_processes(row: Row, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """A row as its processes print it, or with the error that they end with."""
    command = [sys.executable, "-m", "benchmarks.reproducible", str(options.rows)]
    command += ["--row", json.dumps(asdict(row)), "--steps", str(options.steps)]
    port = free_port("127.0.0.1")
    members = [[f"--member={port}:{i}"] for i in range(row.processes)]
    processes = [
        subprocess.Popen(
            [*command, *member], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for member in (members if row.processes > 1 else [[]])
    ]
    deadline = time.monotonic() + seconds
    try:
        texts = [p.communicate(timeout=max(deadline - time.monotonic(), 1)) for p in processes]
        found: dict[str, Any] = json.loads(texts[0][0].splitlines()[-1])
        return found
    except subprocess.TimeoutExpired:
        return asdict(row) | {"error": f"more than {seconds:.0f} s"}
    except (IndexError, json.JSONDecodeError):
        errors = [line for line in texts[0][1].splitlines() if "Error: " in line]
        return asdict(row) | {"error": errors[-1] if errors else "it ended without a row"}
    finally:
        for process in processes:
            process.kill()


def measure(options: argparse.Namespace) -> None:
    """Measure the rows that the file does not have yet, several at a time."""
    chosen = options.only, options.types, options.devices
    wanted = rows(*chosen, processes=not options.times, size=options.size)
    if options.times:
        most = max(options.devices)
        wanted = [replace(row, timed=True) for row in wanted if row.devices == most]
    done = [{k: r[k] for k in asdict(wanted[0])} for r in kept_rows(options.rows)]
    missing = [row for row in wanted if asdict(row) not in done]
    end = time.monotonic() + 60 * options.minutes
    lock = Lock()

    def work(row: Row) -> None:
        seconds = min(options.limit, end - time.monotonic())
        if seconds < 5:
            return
        start = time.monotonic()
        found = measured_in_processes(row, options, seconds)
        with lock:
            if "error" not in found:
                with options.rows.open("a") as file:
                    file.write(json.dumps(found) + "\n")
            text = found.get("error") or verdict(found, kept_rows(options.rows))
            print(f"{time.monotonic() - start:5.0f} s", *asdict(row).values(), text, flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(work, missing))


def parsed() -> argparse.Namespace:
    """The options of the command line."""

    def numbers(text: str) -> list[int]:
        return [int(n) for n in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path, help="file of rows; those in it are not measured again")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--only", default="", help="programs whose name contains this")
    parser.add_argument("--devices", type=numbers, default=list(COUNTS))
    parser.add_argument("--types", type=lambda text: text.split(","), default=list(TYPES))
    parser.add_argument("--times", action="store_true", help="step times on the most devices")
    parser.add_argument("--size", choices=list(SIZES), default="small", help="large: for --times")
    parser.add_argument("--jobs", type=int, default=1, help="rows at a time")
    parser.add_argument("--limit", type=float, default=500, help="seconds for a row")
    parser.add_argument("--minutes", type=float, default=1e6, help="for all rows")
    parser.add_argument("--show", action="store_true", help="print the tables; measure nothing")
    parser.add_argument("--kernels", action="store_true", help="which multiples have one kernel")
    parser.add_argument("--row", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--member", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure one row or all that are missing, or print the tables."""
    options = parsed()
    if options.kernels:
        print({multiple: have_one_kernel(multiple) for multiple in multiples()}, machine())
    elif options.row:
        run_row(Row(**options.row), options.steps, options.member)
    elif options.show:
        print(tables(kept_rows(options.rows), names()))
    else:
        measure(options)


if __name__ == "__main__":
    main()
