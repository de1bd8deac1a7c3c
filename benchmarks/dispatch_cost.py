"""What `gshard.jit` itself costs, beside `jax.jit`: calls of a cached program, and lowering.

    python -m benchmarks.dispatch_cost              all tables
    python -m benchmarks.dispatch_cost --json F     and their figures in a file
    python -m benchmarks.dispatch_cost --markdown   the tables for docs/results/dispatch.md

A call is timed until it returns, not until its results are there, in processor time of the thread
that calls; both kinds of calls alternate, and the medians stand in the table. "other mesh" are
arrays that lie where the program wants them on a mesh of the user's own: `jax.jit` gets the same
arrays. Lowering is timed in processor time of this process, for a step of 48 unrolled layers: the
least of `LOWERED` times, tracing the user's function included. Beside it stands what `jax.jit`
takes to trace the same function, which is part of our time too, and to trace it and write it down
for XLA, for one device. A new `partial` each time is a function that nobody has traced before.
Programs of 200 slices or updates at known rows of a split dim are lowered likewise.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from rich.console import Console
from rich.table import Table

import gshard

ARGUMENTS = (1, 10, 100, 1000)
LAYERS, WIDTH = 48, 64
LOWERED = 3
STATIC = 200


def call_times(calls: Sequence[tuple[Callable, Sequence[Any]]], repeats: int) -> list[float]:
    """The median microseconds of each call, of this thread; they take turns."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for taken, (fn, arguments) in zip(times, calls, strict=True):
            start = time.thread_time()
            results = fn(*arguments)
            taken.append(time.thread_time() - start)
            jax.block_until_ready(results)
    return [1e6 * statistics.median(t) for t in times]


def add_one(*arrays: jax.Array) -> list[jax.Array]:
    return [x + 1 for x in arrays]


def calls_table(repeats: int) -> list[dict[str, Any]]:
    rows = []
    for count in (1, len(jax.devices())):
        devices = jax.devices()[:count]
        plain = Mesh(np.array(devices), ("data",), (AxisType.Auto,))
        other = Mesh(np.array(devices).reshape(count, 1), ("x", "y"), (AxisType.Auto,) * 2)
        for number in ARGUMENTS:
            for name, mesh, spec in (("data", plain, "data"), ("other mesh", other, "x")):
                where = NamedSharding(mesh, jax.P(spec))
                arrays = [jax.device_put(np.ones(8, np.float32), where) for _ in range(number)]
                ours = gshard.jit(add_one, devices=devices)
                theirs = jax.jit(add_one, in_shardings=where, out_shardings=where)
                pair = [(ours, arrays), (theirs, arrays)]
                call_times(pair, 2)
                mine, jaxs = call_times(pair, max(repeats // number, 20))
                rows.append(
                    {
                        "devices": count,
                        "arguments": number,
                        "mesh": name,
                        "gshard_us": mine,
                        "jax_us": jaxs,
                        "ratio": mine / jaxs,
                    }
                )
    return rows


def step(weights: list[dict[str, jax.Array]], x: jax.Array) -> Any:
    """A training step of unrolled layers, its batch split."""

    def loss(weights: list[dict[str, jax.Array]]) -> jax.Array:
        h = gshard.split(x, 0, gshard_devices())
        for w in weights:
            normed = h / jnp.sqrt(jnp.mean(h * h, axis=-1, keepdims=True) + 1e-6) * w["scale"]
            h = h + jax.nn.gelu(normed @ w["up"]) @ w["down"]
        return jnp.mean(h * h)

    gradients = jax.grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)


_count = 8


def gshard_devices() -> int:
    return _count


def least_seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    """The least processor time that `run` takes, and what it returns."""
    best, result = float("inf"), None
    for _ in range(LOWERED):
        start = time.process_time()
        result = run()
        best = min(best, time.process_time() - start)
    return best, result


def lowering_table(counts: Sequence[int] = (8, 64, 512, 2048)) -> list[dict[str, Any]]:
    global _count
    shapes = {"scale": (WIDTH,), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    weights = [
        {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()} for _ in range(LAYERS)
    ]
    rows = []
    for _count in counts:
        x = jax.ShapeDtypeStruct((4 * _count, WIDTH), jnp.float32)

        def lowered(count: int = _count, x: Any = x) -> Any:
            program = gshard.jit(functools.partial(step), devices=count).lower(weights, x)
            assert program.jaxpr  # emitted, too
            return program

        def traced(x: Any = x) -> Any:
            return jax.jit(functools.partial(step)).trace(weights, x)

        jax_trace, _ = least_seconds(traced)
        jax_both, _ = least_seconds(lambda traced=traced: traced().lower())
        seconds, program = least_seconds(lowered)
        rows.append(
            {
                "devices": _count,
                "equations": program.num_equations,
                "seconds": seconds,
                "seconds_per_1000": 1000 * seconds / program.num_equations,
                "jax_trace": jax_trace,
                "jax_trace_and_lower": jax_both,
                "ratio_to_trace": seconds / jax_trace,
            }
        )
    return rows


def windows(x: jax.Array) -> jax.Array:
    """Slices of two rows."""
    return sum((x[2 * i : 2 * i + 2] * i for i in range(STATIC)), jnp.zeros(()))


def updates(x: jax.Array) -> jax.Array:
    """Rows that are set one by one."""
    for i in range(STATIC):
        x = x.at[2 * i].set(i * 1.0)
    return x


def sums(x: jax.Array) -> jax.Array:
    """Rows that are added to one by one."""
    for i in range(STATIC):
        x = x.at[2 * i].add(i * 1.0)
    return x


def gradient_of_windows(x: jax.Array) -> jax.Array:
    return jax.grad(lambda x: jnp.sum(jnp.sin(windows(x))))(x)


def static_rows_table() -> list[dict[str, Any]]:
    x = jax.ShapeDtypeStruct((4 * STATIC, 4), jnp.float32)
    rows = []
    for fn in (windows, updates, sums, gradient_of_windows):

        def lowered(fn: Callable = fn) -> Any:
            return gshard.jit(lambda x: fn(gshard.split(x, 0, 8)), devices=8).lower(x)

        def by_jax(fn: Callable = fn) -> Any:
            return jax.jit(functools.partial(fn)).lower(x)

        jax_seconds, _ = least_seconds(by_jax)
        seconds, program = least_seconds(lowered)
        rows.append(
            {
                "program": fn.__name__.replace("_", " "),
                "its_equations": len(jax.make_jaxpr(fn)(x).eqns),
                "equations": program.num_equations,
                "seconds": seconds,
                "jax_trace_and_lower": jax_seconds,
                "ratio": seconds / jax_seconds,
            }
        )
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    """A table as it stands in the docs."""
    lines = ["| " + " | ".join(name.replace("_", " ") for name in rows[0]) + " |"]
    lines.append("|" + "---:|" * len(rows[0]))
    lines += ["| " + " | ".join(map(shown, row.values())) + " |" for row in rows]
    return "\n".join(lines)


def shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=2000)
    parser.add_argument("--markdown", action="store_true", help="print the tables for the docs")
    given = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    tables = {
        "calls": calls_table(given.repeats),
        "lowering": lowering_table(),
        "static_rows": static_rows_table(),
    }
    console = Console(width=100)
    if given.json:
        given.json.write_text(json.dumps(tables, indent=1))
    if given.markdown:
        print(*map(markdown, tables.values()), sep="\n\n")
        return
    titles = ("a cached call, in microseconds", "lowering", "lowering of static slices and updates")
    for title, rows in zip(titles, tables.values(), strict=True):
        table = Table(title=title)
        for name in rows[0]:
            table.add_column(name.replace("_", " "), justify="right")
        for row in rows:
            table.add_row(*map(shown, row.values()))
        console.print(table)


if __name__ == "__main__":
    main()
