"""Every program of the benchmarks and tests, lowered: its bytes, equations and text, in a file.

    python -m benchmarks.census --out before.json              lower all of them
    python -m benchmarks.census --out after.json --compare before.json

A change of the partitioner that should change nothing is held to this: with `--compare` the rows
that differ are printed, and the exit status is 1 if a program sends more bytes than before. With
`--markdown` the comparison is the table of docs/results/before-and-after.md.

The code of another commit is lowered in a checkout that has its package:

    git worktree add OTHER && cd OTHER && git rm -rq gshard && git checkout COMMIT -- gshard
    python -m benchmarks.census --out before.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gshard
from benchmarks.programs import programs
from benchmarks.recipes import recipes
from examples.recipes.transformer import LARGE, SMALL
from tests.programs import in_jax_words, test_random_programs, test_strangers

Case = tuple[str, Callable[..., Any], tuple[Any, ...], Any]  # name, function, arguments, devices


def cases(random: int) -> Iterator[Case]:
    """All programs, each with shapes or arrays to lower it for."""
    for program in programs():
        yield program.name, program.fn, program.args, None
    for size, name in ((SMALL, "small"), (LARGE, "large"))[: 1 if random < 50 else 2]:
        for recipe in recipes(size):
            yield f"{recipe.name}, {name}", recipe.step, recipe.arguments, None
    for name, make in in_jax_words.PROGRAMS.items():
        step, arguments, _ = make()
        yield name, step, arguments, None
    for case in [*test_strangers.CASES, *test_strangers.MORE]:
        step, params, batch = test_strangers.training(*case)
        model, parts, devices, accumulate = case
        yield f"{model}, {parts} of {devices}, {accumulate}", step, (params, batch), devices
    for seed in range(random):
        yield random_program(seed)


def random_program(seed: int) -> Case:
    """A program of up to six operations under random annotations, with its gradient."""
    rng = np.random.default_rng(seed)
    devices = int(rng.choice([2, 3, 4, 6, 8]))
    shapes = [tuple(int(n) for n in rng.integers(1, 10, 2)) for _ in range(2)]

    def assignment() -> np.ndarray | None:
        if rng.random() < 0.25:
            return None
        rows = int(rng.integers(1, devices + 1))
        columns = int(rng.integers(1, devices // rows + 1))
        ids = rng.permutation(devices) if rng.random() < 0.5 else np.arange(devices)
        return ids[: rows * columns].reshape(rows, columns)

    names = sorted(test_random_programs.OPERATIONS)
    steps = [
        (str(rng.choice(names)), int(rng.integers(10)), int(rng.integers(10)), assignment())
        for _ in range(rng.integers(1, 7))
    ]
    inputs = [assignment() for _ in shapes]

    def mark(x: Any, assigned: Any) -> Any:
        return x if assigned is None else gshard.shard(x, assigned)

    fn = test_random_programs.program(steps, inputs, mark)

    def both(*xs: Any) -> Any:
        return fn(*xs), jax.grad(lambda *a: fn(*a)[1], argnums=(0, 1))(*xs)

    arguments = tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)
    return f"random {seed}", both, arguments, devices


def lowered_row(fn: Callable[..., Any], arguments: tuple[Any, ...], devices: Any) -> dict[str, Any]:
    """What one program came to."""
    chosen = None if devices is None else jax.devices()[:devices]
    start = time.process_time()
    lowered = gshard.jit(fn, devices=chosen).lower(*arguments)
    assert lowered.jaxpr  # emitted, too
    seconds = time.process_time() - start
    return {
        "bytes": sum(c.total_bytes for c in lowered.collectives),
        # Older commits do not say how many values a collective has.
        "collectives": sum(c.count * getattr(c, "values", 1) for c in lowered.collectives),
        "equations": lowered.num_equations,
        "text": hashlib.sha256(lowered.as_text().encode()).hexdigest()[:16],
        "seconds": round(seconds, 3),
    }


def compare(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Print what differs; whether no program sends more."""
    worse, same = [], 0
    for name, row in after.items():
        old = before.get(name)
        if old is None:
            print(f"new        {name}")
            continue
        if row["bytes"] > old["bytes"]:
            worse.append(name)
        same += row["text"] == old["text"]
        changed = [k for k in ("bytes", "collectives", "equations") if row[k] != old[k]]
        if changed:
            print(f"{name}: " + ", ".join(f"{k} {old[k]:,} -> {row[k]:,}" for k in changed))
    seconds = [sum(row["seconds"] for row in rows.values()) for rows in (before, after)]
    equations = [sum(row["equations"] for row in rows.values()) for rows in (before, after)]
    print(f"{same} of {len(after)} programs have the same text; {len(worse)} send more")
    print(f"equations {equations[0]:,} -> {equations[1]:,}; processor seconds "
          f"{seconds[0]:.1f} -> {seconds[1]:.1f}")  # fmt: skip
    return not worse


def markdown(before: dict[str, Any], after: dict[str, Any]) -> str:
    """A row for every program that is not random, and one for all random ones."""
    rows, random = [], [name for name in after if name.startswith("random ") and name in before]
    for name in [n for n in after if n in before and n not in random]:
        rows.append((name, before[name], after[name]))
    sums = [
        {k: sum(found[name][k] for name in random) for k in ("bytes", "equations")}
        for found in (before, after)
    ]
    rows.append((f"{len(random)} random programs", *sums))
    lines = [
        "| program | bytes before | now | equations before | now |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, old, new in rows:
        numbers = (old["bytes"], new["bytes"], old["equations"], new["equations"])
        lines.append(f"| {name} | " + " | ".join(f"{n:,}" for n in numbers) + " |")
    return "\n".join(lines)


def main() -> None:
    """Lower all programs, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--markdown", action="store_true", help="print a table of both")
    parser.add_argument(
        "--random",
        type=int,
        default=150,
        help="how many random programs; with fewer than 50, no large recipes",
    )
    chosen = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    found = {}
    for name, fn, arguments, devices in cases(chosen.random):
        try:
            found[name] = lowered_row(fn, arguments, devices)
        except Exception as error:  # one broken program must not hide the others
            print(f"FAILED {name}: {type(error).__name__}: {error}", file=sys.stderr)
    chosen.out.write_text(json.dumps(found, indent=1))
    before = json.loads(chosen.compare.read_text()) if chosen.compare else {}
    if chosen.markdown:
        print(markdown(before, found))
    if before and not compare(before, found):
        sys.exit(1)


if __name__ == "__main__":
    main()
