"""Where XLA's partitioner is wrong, on the JAX that is installed: open reports, and gshard beside.

    python -m benchmarks.xla_bugs             the table
    python -m benchmarks.xla_bugs --markdown  the table for docs/results/xla-bugs.md

Each program runs unpartitioned, under `jax.jit` with shardings of its arguments and results, and
under `gshard.jit` with the same as annotations, and `gshard.check` says of the programs that both
partitioners make of these whether they are right. Rows that gshard gets wrong, or refuses, are in
the same table.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

import gshard

P = PartitionSpec


@dataclass(frozen=True)
class Case:
    """A program with the dims that are split, of its arguments and of its result (None: none)."""

    report: str
    what: str
    function: Callable[..., jax.Array]
    arguments: tuple[Any, ...]
    split: tuple[int | None, ...]
    result: int | None
    devices: int


def concatenated(x_N):
    """Two rotations by concatenations of negative pads."""
    one = lax.concatenate([lax.pad(x_N, 0.0, [(-3, 0, 0)]), lax.pad(x_N, 0.0, [(0, -1, 0)])], 0)
    two = lax.concatenate([lax.pad(x_N, 0.0, [(-1, 0, 0)]), lax.pad(x_N, 0.0, [(0, -3, 0)])], 0)
    return one + two


def read(x_MN, start):
    """A slice whose start is clamped."""
    return lax.dynamic_slice(x_MN, [jnp.int32(0), start], (2, 6))


def write(x_MN, u_MK, start):
    """An update whose start is clamped."""
    return lax.dynamic_update_slice(x_MN, u_MK, [jnp.int32(0), start])


def scattered(x_N, index_K, u_K):
    """The gradient of a scatter-add with respect to its updates."""
    return jax.grad(lambda u: jnp.sum(jnp.sin(jnp.asarray(x_N).at[index_K].add(u))))(u_K)


def bag(table_VM, index_BK, weight_BK):
    """Looked-up rows times weights, some of which are infinite."""
    return jnp.sum(table_VM[index_BK] * weight_BK[..., None], axis=1)


def scaled(x_NK, y_KM, weight_NM):
    """A product over a split dim, times weights of which some are infinite, summed."""
    return jnp.sum((x_NK @ y_KM) * weight_NM, axis=0)


def cases() -> list[Case]:
    """The open reports whose programs run on CPUs, and what gshard had wrong, or still has."""
    rng = np.random.default_rng(0)
    x = np.arange(16, dtype=np.int32).reshape(2, 8)
    small = np.arange(4, dtype=np.int32).reshape(2, 2)
    table = np.abs(rng.normal(size=(512, 8))).astype(np.float32)
    index = rng.integers(0, 512, (64, 16)).astype(np.int32)
    weight = np.ones((64, 16), np.float32)
    weight[::2, 5] = np.inf
    infinite = np.ones((512, 16), np.float32)
    infinite[3] = np.inf
    return [
        Case("xla 49122", "dynamic_slice beyond the end", read, (x, np.int32(7)), (1, None), 1, 2),
        Case("xla 49118", "dynamic_update_slice beyond the end", write,
             (small, np.full((2, 1), 99, np.int32), np.int32(2)), (1, None, None), 1, 2),
        Case("xla 49118", "the same, of six columns", write,
             (x, -np.ones((2, 6), np.int32), np.int32(7)), (1, 1, None), 1, 2),
        Case("jax 39301", "rotations by concatenated pads", concatenated,
             (np.arange(4, dtype=np.float32),), (0,), 0, 4),
        Case("xla 42481", "gradient of a scatter-add", scattered,
             (np.zeros(16, np.float32), np.arange(16, dtype=np.int32) % 5,
              np.arange(16, dtype=np.float32)), (0, None, 0), 0, 4),
        *(Case("jax 40232", f"random.normal in {n} shards",
               lambda key: jax.random.normal(key, (496, 3)), (jax.random.key(0),), (None,), 0, n)
          for n in (2, 4, 8)),
        Case("xla 45222", "roll, a permute of one cycle", lambda x: jnp.roll(x, 1, 0),
             (np.arange(16, dtype=np.float32).reshape(8, 2),), (0,), 0, 4),
        Case("gshard, mended", "rows of a split table times infinity", bag,
             (table, index, weight), (0, 0, 0), 0, 8),
        Case("gshard, open", "a sum over devices times infinity", scaled,
             (rng.normal(size=(512, 64)).astype(np.float32),
              rng.normal(size=(64, 16)).astype(np.float32), infinite), (1, 0, None), None, 8),
    ]  # fmt: skip


def verdict(wanted: jax.Array, run: Callable[[], Any]) -> str:
    """Whether a run gives the values, or what else it does."""
    try:
        found = np.asarray(run())
    except Exception as error:  # whatever a compiler raises is the finding
        return type(error).__name__
    close = np.allclose if np.issubdtype(found.dtype, np.inexact) else np.array_equal
    options = {"equal_nan": True, "rtol": 1e-5} if close is np.allclose else {}
    return "equal" if close(found, np.asarray(wanted), **options) else "wrong values"


def checked(run: Callable[[], gshard.Report]) -> str:
    """What a check says, or why there is none."""
    try:
        report = run()
    except Exception as error:  # as above
        return type(error).__name__
    return "right" if report.ok else "refuted"


def measure(case: Case) -> dict[str, str]:
    """What both partitioners make of a program."""
    mesh = jax.make_mesh((case.devices,), ("x",), devices=jax.devices()[: case.devices])
    wanted = case.function(*case.arguments)

    def spec(dim: int | None) -> NamedSharding:
        return NamedSharding(mesh, P() if dim is None else P(*(None,) * dim, "x"))

    def annotated(*arguments: Any) -> jax.Array:
        def split(x: Any, dim: int | None) -> Any:
            return x if dim is None else gshard.split(x, dim, case.devices)

        return split(case.function(*map(split, arguments, case.split)), case.result)

    theirs = jax.jit(
        case.function, in_shardings=tuple(map(spec, case.split)), out_shardings=spec(case.result)
    )
    devices = jax.devices()[: case.devices]
    ours = gshard.jit(annotated, devices=devices)
    by_xla = gshard.jit(annotated, devices=devices, partitioner="xla")
    return {
        "jax.jit": verdict(wanted, lambda: theirs(*case.arguments)),
        "gshard.jit": verdict(wanted, lambda: ours(*case.arguments)),
        "check of XLA's": checked(lambda: gshard.check(by_xla, *case.arguments)),
        "check of gshard's": checked(lambda: gshard.check(ours, *case.arguments)),
    }


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--markdown", action="store_true", help="print the table for the docs")
    options = parser.parse_args()
    rows = [(case.report, case.what, *measure(case).values()) for case in cases()]
    heads = ("report", "program", "jax.jit", "gshard.jit", "check of XLA's", "check of gshard's")
    if options.markdown:
        print(f"JAX {jax.__version__}\n")
        lines = [heads, ("---",) * len(heads), *rows]
        print(*(f"| {' | '.join(line)} |" for line in lines), sep="\n")
        return
    table = Table(*heads, title=f"JAX {jax.__version__}, values beside the unpartitioned run's")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    main()
