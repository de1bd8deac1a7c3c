"""The slow oracle: the unpartitioned run, and strategies that draw ways to partition it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import gshard
from gshard.uneven import UnevenArray

DEVICE_COUNTS = (2, 3, 4, 6, 8)
SIZES = (1, 2, 3, 5, 7, 8, 12, 13)

Assignment = np.ndarray | None


@st.composite
def assignments(draw, rank: int, devices: int, dims: Sequence[int] | None = None) -> Assignment:
    """A device assignment for a tensor: any tile counts on `dims`, any order, maybe fewer devices.

    None is a tensor that the user says nothing about.
    """
    if rank == 0 or draw(st.integers(0, 5)) == 0:
        return None
    tiles = [1] * rank
    left = devices
    for dim in draw(st.permutations(range(rank) if dims is None else list(dims))):
        tiles[dim] = draw(st.integers(1, left))
        left //= tiles[dim]
    ids = list(range(devices))
    if draw(st.booleans()):
        ids = draw(st.permutations(ids))
    return np.array(ids[: math.prod(tiles)]).reshape(tiles)


def even_split(rank: int, dim: int, count: int) -> np.ndarray:
    """`split(tensor, dim, count)` as an assignment."""
    tiles = [1] * rank
    tiles[dim] = count
    return np.arange(count).reshape(tiles)


def random_array(shape: Sequence[int], dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    """Values that sums keep apart: small integers for integers, normal numbers for floats."""
    rng = np.random.default_rng([seed, *shape])
    dtype = jnp.dtype(dtype)
    if dtype == jnp.bool_:
        return rng.random(shape) < 0.5
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return np.asarray(rng.normal(size=shape)).astype(dtype)
    low = 0 if jnp.issubdtype(dtype, jnp.unsignedinteger) else -9
    return rng.integers(low, 10, size=shape).astype(dtype)


def annotated(
    fn: Callable, inputs: Sequence[Assignment] = (), outputs: Sequence[Assignment] = ()
) -> Callable:
    """`fn` with annotations on its arguments and results (flat; missing or None: none)."""

    def mark(values, assigned):
        leaves, tree = jax.tree.flatten(values)
        wanted = [*assigned, *[None] * (len(leaves) - len(assigned))]
        return tree.unflatten(
            [x if a is None else gshard.shard(x, a) for x, a in zip(leaves, wanted, strict=True)]
        )

    return lambda *args: mark(fn(*mark(args, inputs)), outputs)


def check(
    fn: Callable,
    *args: Any,
    devices: int = 8,
    inputs: Sequence[Assignment] = (),
    outputs: Sequence[Assignment] = (),
    exact: bool = False,
    rtol: float = 1e-5,
    atol: float = 1e-5,
) -> gshard.Lowered:
    """Assert that the partitioned run gives the unpartitioned values; the lowered program.

    `exact` wants them bit for bit. NaN equals NaN.
    """
    wanted = jax.jit(fn)(*args)
    step = gshard.jit(annotated(fn, inputs, outputs), devices=jax.devices()[:devices])
    got = step(*args)
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.shape == b.shape, (a.shape, b.shape)
        assert a.dtype == b.dtype, (a.dtype, b.dtype)
        compare(a, b, exact, rtol, atol)
    return step.lower(*args)


def check_grad(
    fn: Callable, *args: Any, argnums: Any = 0, outputs: Sequence[Assignment] = (), **how: Any
) -> gshard.Lowered:
    """`check` for the gradient of a weighted sum of `fn`'s (float) results.

    `outputs` annotates those results, and with them their cotangents.
    """
    fn = annotated(fn, (), outputs)

    def loss(*xs):
        leaves = [y for y in jax.tree.leaves(fn(*xs)) if jnp.issubdtype(y.dtype, jnp.inexact)]
        weights = [jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape) for y in leaves]
        return sum(jnp.sum(jnp.real(y) * w) for y, w in zip(leaves, weights, strict=True))

    return check(jax.grad(loss, argnums=argnums), *args, **how)


def compare(a: Any, b: Any, exact: bool, rtol: float = 1e-5, atol: float = 1e-5) -> None:
    """Assert equality of a partitioned result `a` and an unpartitioned one `b`."""
    if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
        a = a.logical() if isinstance(a, UnevenArray) else a
        a, b = (jax.random.key_data(getattr(x, "logical", lambda x=x: x)()) for x in (a, b))
    a, b = np.asarray(a), np.asarray(b)
    if exact and jnp.issubdtype(b.dtype, jnp.floating) and b.dtype.itemsize <= 2:
        a, b = a.astype(np.float32), b.astype(np.float32)  # NumPy takes a NaN of theirs for unequal
    if exact or not jnp.issubdtype(b.dtype, jnp.inexact):
        np.testing.assert_array_equal(a, b)
        return
    if b.dtype.itemsize <= 2:
        a, b, rtol, atol = a.astype(np.float32), b.astype(np.float32), 3e-2, 3e-2
    np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, equal_nan=True)


def sent(lowered: gshard.Lowered, kind: str | None = None) -> int:
    """Bytes that one device sends, by all collectives or those of one kind."""
    return sum(c.total_bytes for c in lowered.collectives if kind in (None, c.kind))


def kinds(lowered: gshard.Lowered) -> dict[str, int]:
    """How many values collectives of each kind move, those that travel together one by one."""
    found: dict[str, int] = {}
    for c in lowered.collectives:
        found[c.kind] = found.get(c.kind, 0) + c.count * c.values
    return found
