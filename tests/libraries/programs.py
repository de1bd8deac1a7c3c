"""Other people's programs: `jax.jit`'s values, and a list of what they gather."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

import gshard
from tests.oracle import assert_same, run

SMALL = 4096  # bytes: what a batch's statistics, losses and flags may take

CHECKED: list[dict[str, Any]] = []  # what moved in each program, for tools/library_table.py


def check_program(
    fn: Callable, *args: Any, split: Mapping[int, int], tolerance: float = 1e-4
) -> list[str]:
    """Assert the values of `jax.jit`; the reasons of all that moves and is no small reduction.

    `split` says along which dim the arrays of an argument are split over 8 devices.
    """

    def annotated(*args):
        marked = list(args)
        for number, dim in split.items():
            marked[number] = jax.tree.map(
                lambda x, dim=dim: gshard.split(x, dim, min(8, x.shape[dim])), args[number]
            )
        return fn(*marked)

    wanted = jax.jit(fn)(*args)
    lowered = gshard.jit(annotated, strict=True).lower(*args)
    close = {"rtol": tolerance, "atol": tolerance}
    assert_same(run(lowered.compile(), *args, **close), wanted, **close)
    moved = [c for c in lowered.collectives if c.bytes]
    CHECKED.append({"values": len(jax.tree.leaves(wanted)), "tolerance": tolerance, "moved": moved})
    return sorted({f"{c.kind}: {c.reason}" for c in moved if not _is_small_sum(c)})


def _is_small_sum(c: Any) -> bool:
    """Whether it is a small reduction, or one of several that travel together."""
    return c.kind == "all_reduce" and (c.bytes <= SMALL or c.values > 1)


def data(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal numbers."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)
