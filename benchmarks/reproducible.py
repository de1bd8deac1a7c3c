"""The same bits on any devices: what `reproducible=True` promises, tried, and what it costs.

    python -m benchmarks.reproducible                    all programs, 100 steps
    python -m benchmarks.reproducible --steps 2 --only data --devices 1,8
    python -m benchmarks.reproducible --out docs/results/reproducible.md

For each program and each number of devices, the losses and weights after the steps are compared
with those of one device, bit by bit. Recipes have sizes that depend on the number of devices, so
that each is compared with itself on one device, without its annotations. Bytes are what a device
sends in a step, and times are medians of a step, beside those of the usual program.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import gshard
from benchmarks.recipes import NAMES
from examples.recipes.transformer import Size
from gshard.nn import Batch, Strategy, TransformerConfig, adafactor, init_state, train_step

COUNTS = (1, 2, 3, 4, 6, 8)
SMALL = Size(L=1, B=24, S=24, M=48, N=8, F=96, V=96)
MOE = "MoE Transformer"
UNANNOTATED = ("split", "shard", "replicate", "mesh_split")


@dataclass(frozen=True)
class Case:
    """A training step on some devices, its first arguments, and the same step on one device."""

    name: str
    devices: int
    step: Callable[..., Any]
    alone: Callable[..., Any]
    arguments: tuple[Any, ...]


def drawn(shape: jax.ShapeDtypeStruct, rng: np.random.Generator, dtype: Any) -> Any:
    """An argument of a recipe; its floats have the type `dtype`."""
    if jnp.issubdtype(shape.dtype, jnp.integer):
        return rng.integers(0, 8, shape.shape).astype(shape.dtype)
    kind = dtype if shape.dtype == jnp.float32 else shape.dtype
    return np.asarray(rng.normal(size=shape.shape) / 8).astype(kind)


def without_annotations(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A step as for one device."""

    def step(*args: Any) -> Any:
        plain = {name: lambda x, *_, **__: x for name in UNANNOTATED if hasattr(gshard, name)}
        with mock.patch.multiple(gshard, **plain):
            return fn(*args)

    return step


@contextlib.contextmanager
def recipes_for(devices: int) -> Iterator[list[ModuleType]]:
    """The modules of all recipes, which know the number of devices as a constant."""
    modules = [importlib.import_module(f"examples.recipes.{name}") for name in NAMES]
    with contextlib.ExitStack() as stack:
        for module in (m for m in modules if hasattr(m, "D")):
            stack.enter_context(mock.patch.object(module, "D", devices))
        yield modules


def recipes_on(devices: int, dtype: Any, only: str) -> Iterator[Case]:
    """The recipes for so many devices, each to be run before the next is asked for.

    Those with a mesh of their own are for 8.
    """
    with recipes_for(devices) as modules:
        for recipe in (r for m in modules for r in m.recipes(SMALL) if only in r.name):
            rng = np.random.default_rng(0)
            arguments = jax.tree.map(lambda x, rng=rng: drawn(x, rng, dtype), recipe.arguments)
            alone = without_annotations(recipe.step)
            yield Case(recipe.name, devices, recipe.step, alone, tuple(arguments))


def transformer_on(devices: int, dtype: Any) -> Case:
    """A training step of a small MoE Transformer with dropout and random routing."""
    dims = {"model_dim": 48, "hidden_dim": 96, "heads": 4, "key_dim": 16, "value_dim": 16}
    dropout = {"input_dropout": 0.1, "residual_dropout": 0.1}
    config = TransformerConfig(
        64, 64, encoder_layers=2, decoder_layers=2, experts=24, groups=24, dispatch="einsum",
        dtype=dtype, **dims, **dropout,
    )  # fmt: skip
    optimizer = adafactor(0.3, warmup=1)
    rng = np.random.default_rng(0)
    tokens = [jnp.asarray(rng.integers(3, 64, (24, 8)), jnp.int32) for _ in range(2)]
    state = jax.jit(lambda key: init_state(config, optimizer, key))(jax.random.key(0))

    def on(strategy: Strategy) -> Callable[..., Any]:
        def step(state: Any, source: Any, target: Any) -> Any:
            batch = Batch.of(source, target)
            key = jax.random.key(7)
            return train_step(state, batch, key, optimizer=optimizer, strategy=strategy)

        return step

    strategy = Strategy(devices) if devices > 1 else Strategy()
    return Case(MOE, devices, on(strategy), on(Strategy()), (state, *tokens))


def cases(devices: int, dtype: str, only: str) -> Iterator[Case]:
    """The programs whose names contain `only`."""
    if only in MOE:
        yield transformer_on(devices, dtype)
    yield from recipes_on(devices, jnp.dtype(dtype), only)


def digest(tree: Any) -> str:
    """The bits of all arrays in a tree."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        leaf = leaf.logical() if hasattr(leaf, "logical") else leaf
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()[:16]


def trained(compiled: Any, arguments: tuple[Any, ...], steps: int) -> tuple[str, float]:
    """The bits of all results of `steps` steps, and the median time of a step.

    A result that is like an argument takes its place in the next step.
    """
    types = [jax.tree.map(jnp.shape, a) for a in arguments]
    bits, times = [], []
    for _ in range(steps):
        start = time.perf_counter()
        results = jax.block_until_ready(compiled(*compiled.place(*arguments)))
        times.append(time.perf_counter() - start)
        bits.append(digest(results))
        parts = list(results) if isinstance(results, tuple | list) else [results]
        following = list(arguments)
        for part in parts:
            found = [i for i, t in enumerate(types) if t == jax.tree.map(jnp.shape, part)]
            if found:
                following[found[0]] = part
        arguments = tuple(following)
    return hashlib.sha256("".join(bits).encode()).hexdigest()[:16], statistics.median(times)


_alone: dict[Any, str] = {}  # the bits of programs on one device


def bits_alone(case: Case, steps: int) -> str:
    """The bits of a program on one device, which is run once for equal arguments."""
    key = (case.name, steps, digest(case.arguments))
    if key not in _alone:
        one = gshard.jit(case.alone, devices=jax.devices()[:1], reproducible=True)
        _alone[key], _ = trained(one.lower(*case.arguments).compile(), case.arguments, steps)
    return _alone[key]


def measured(case: Case, steps: int, usual: bool) -> dict[str, Any]:
    """Whether the bits are those of one device; bytes and times beside the usual program."""
    here = jax.devices()[: case.devices]
    lowered = gshard.jit(case.step, devices=here, reproducible=True).lower(*case.arguments)
    found: dict[str, Any] = {"bytes": sum(c.total_bytes for c in lowered.collectives)}
    bits, found["time"] = trained(lowered.compile(), case.arguments, steps)
    found["bits"] = "equal" if bits == bits_alone(case, steps) else "DIFFERENT"
    if usual:
        plain = gshard.jit(case.step, devices=here).lower(*case.arguments)
        found["usual bytes"] = sum(c.total_bytes for c in plain.collectives)
        other, found["usual time"] = trained(plain.compile(), case.arguments, min(steps, 10))
        found["usual"] = "equal" if other == bits_alone(case, min(steps, 10)) else "different"
    return found


def row(case: Case, dtype: str, found: dict[str, Any]) -> str:
    """A line of the table."""
    cells = [case.name, dtype, str(case.devices), found["bits"]]
    if "usual bytes" in found:
        more = found["bytes"] / found["usual bytes"] if found["usual bytes"] else 1.0
        slower = found["time"] / found["usual time"]
        cells += [found["usual"], f"{found['bytes']:,}", f"{more:.2f}", f"{slower:.2f}"]
    else:
        cells += ["", f"{found['bytes']:,}" if "bytes" in found else "", "", ""]
    return f"| {' | '.join(cells)} |"


HEADER = (
    "| program | type | devices | bits | bits of the usual program | bytes | x usual | time x usual"
    " |\n|---|---|---:|---|---|---:|---:|---:|"
)


def main() -> None:
    """Print the table, and write it to a file."""
    jax.config.update("jax_num_cpu_devices", max(COUNTS))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--only", default="", help="programs whose name contains this")
    parser.add_argument("--devices", default=",".join(map(str, COUNTS)))
    parser.add_argument("--types", default="float32,bfloat16")
    parser.add_argument("--usual", default="8", help="device counts for the usual program too")
    parser.add_argument("--out", type=Path, help="append the table to this page")
    options = parser.parse_args()
    usual = [int(n) for n in options.usual.split(",") if n]
    lines = [HEADER]
    print(HEADER, flush=True)
    for dtype in options.types.split(","):
        for devices in map(int, options.devices.split(",")):
            for case in cases(devices, dtype, options.only):
                try:
                    found = measured(case, options.steps, devices in usual)
                except ValueError as error:
                    if "devices" not in str(error):
                        raise
                    found = {"bits": "its mesh has 8 devices"}
                lines.append(row(case, dtype, found))
                print(lines[-1], flush=True)
    if options.out:
        options.out.write_text(options.out.read_text() + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
