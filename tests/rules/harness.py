"""JAX's own cases for its primitives, with operands sharded at random, as an oracle for the rules.

The cases come with JAX (`jax._src.internal_test_util.test_harnesses`). Each is run by `jax.jit` on
one device and by `gshard.jit` on eight, its operands and results split along any dims, into any
numbers of tiles, in any order of devices; all drawn from the case's name.
"""

from __future__ import annotations

import functools
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gshard
from tests.oracle import annotated, run

DEVICES = 8


@functools.cache
def cases() -> dict[str, Any]:
    """All cases that JAX runs on a CPU, by name."""
    from jax._src.internal_test_util import test_harnesses

    found = {h.fullname: h for h in test_harnesses.all_harnesses if h.filter("cpu")}
    return dict(sorted(found.items()))  # JAX's own order is not the same in every process


def spread(per_group: int) -> list[str]:
    """At most so many cases for each primitive, far apart in its list."""
    groups: dict[str, list[str]] = {}
    for name, case in cases().items():
        groups.setdefault(case.group_name, []).append(name)
    chosen = []
    for names in groups.values():
        count = min(per_group, len(names))
        chosen += [names[i * len(names) // count] for i in range(count)]
    return chosen


def random_assignment(rng: np.random.Generator, rank: int) -> np.ndarray | None:
    """Tile counts for some dims, uneven ones too, on devices in any order; or nothing at all."""
    if rank == 0 or rng.random() < 0.2:
        return None
    tiles, left = [1] * rank, DEVICES
    for dim in rng.permutation(rank)[: rng.integers(1, 3)]:
        tiles[dim] = int(rng.integers(1, left + 1))
        left //= tiles[dim]
    return rng.permutation(DEVICES)[: math.prod(tiles)].reshape(tiles)


def partitioned(name: str) -> tuple[Any, Any]:
    """A case as a function of `gshard.jit`, sharded at random, and its arguments."""
    case, seed = cases()[name], zlib.crc32(name.encode())
    args = case.dyn_args_maker(np.random.RandomState(seed))
    rng = np.random.default_rng(seed)
    inputs, outputs = (
        [random_assignment(rng, jnp.ndim(x)) for x in jax.tree.leaves(values)]
        for values in (args, jax.eval_shape(case.dyn_fun, *args))
    )
    outputs = outputs if rng.random() < 0.5 else []
    fn = annotated(case.dyn_fun, inputs, outputs)
    return gshard.jit(fn, devices=jax.devices()[:DEVICES]), args


def run_case(name: str) -> gshard.Lowered:
    """Assert that a case gives `jax.jit`'s values when it is partitioned; the lowered program."""
    jitted, args = partitioned(name)
    wanted = jax.jit(cases()[name].dyn_fun)(*args)
    got = run(jitted, *args)
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        compare(np.asarray(a), np.asarray(b))
    return jitted.lower(*args)


def compare(got: np.ndarray, wanted: np.ndarray) -> None:
    """Equal, or as close as sums in another order are for numbers of that size."""
    if not jnp.issubdtype(wanted.dtype, jnp.inexact):
        np.testing.assert_array_equal(got, wanted)
        return
    wide = np.complex128 if jnp.issubdtype(wanted.dtype, jnp.complexfloating) else np.float64
    tolerance = 32 * float(jnp.finfo(wanted.dtype).eps)
    normal = float(jnp.finfo(wanted.dtype).smallest_normal)
    small = (wanted != 0) & (np.abs(wanted.astype(wide)) < normal)
    # XLA flushes subnormal numbers on CPUs: bfloat16 on x86 even where it only moves them.
    got = np.where(small & (got == 0), wanted, got)
    got, wanted = got.astype(wide), wanted.astype(wide)
    finite = np.abs(wanted[np.isfinite(wanted)])
    largest = float(finite.max()) if finite.size else 0.0
    np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance * largest)
