"""The slow oracle: the unpartitioned run, and strategies that draw ways to partition it.

Tests that compare values call through `run`, directly or by `check`: a function that is jitted
takes another path in its second call than in its first, and another program for arguments that are
sharded otherwise.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gshard
from gshard import UnevenArray

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
    step = gshard.jit(annotated(fn, inputs, outputs), devices=jax.devices()[:devices])
    got = run(step, *args, exact=exact, rtol=rtol, atol=atol)
    assert_same(got, jax.jit(fn)(*args), exact, rtol, atol)
    return step.lower(*args)


def run(
    step: Callable, *args: Any, exact: bool = False, rtol: float = 1e-5, atol: float = 1e-5
) -> Any:
    """The results of a jitted function, after two more calls that have to give the same bits.

    `make test-all` calls it also with arguments that are placed elsewhere; the results have to
    agree as closely as the test demands.
    """
    got = step(*args)
    for _ in range(2):
        assert_same(step(*args), got, exact=True)
    if settings.get_current_profile_name() == "thorough":
        assert_same(step(*placed_anew(step, args)), got, exact, rtol, atol)
    return got


def placed_anew(step: Callable, args: Any, seed: int = 0) -> Any:
    """The arguments in NumPy, uncommitted, or on a mesh, replicated or sharded: drawn for each."""
    leaves, tree = jax.tree.flatten(args)
    drawn = zlib.crc32(repr([np.shape(x) for x in leaves]).encode())
    rng = np.random.default_rng([drawn, seed])
    devices = getattr(getattr(step, "options", None), "devices", None)
    return tree.unflatten([_placed(x, devices or jax.devices(), rng) for x in leaves])


def _placed(value: Any, devices: Sequence[jax.Device], rng: np.random.Generator) -> Any:
    is_array = isinstance(value, np.ndarray | jax.Array) and not isinstance(value, UnevenArray)
    if not is_array or getattr(value, "weak_type", False):  # of a Python number
        return value
    if not jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = np.asarray(value)
    where = rng.choice(["numpy", "uncommitted", "one device", "replicated", "sharded", "sharded"])
    if where == "numpy":
        return value
    if where == "uncommitted":
        return jnp.asarray(value)
    if where == "one device":
        return jax.device_put(value, devices[rng.integers(len(devices))])
    axes = [n for n in (2, len(devices) // 2) if len(devices) % 2 == 0] or [len(devices)]
    mesh = Mesh(rng.permutation(np.asarray(devices)).reshape(axes), ("a", "b")[: len(axes)])
    spec: list[Any] = [None] * value.ndim
    for axis in mesh.axis_names if where == "sharded" else ():
        dims = [
            d for d in range(value.ndim) if not spec[d] and value.shape[d] % mesh.shape[axis] == 0
        ]
        if dims:
            spec[rng.choice(dims)] = axis
    return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))


def assert_same(
    got: Any, wanted: Any, exact: bool = False, rtol: float = 1e-5, atol: float = 1e-5
) -> None:
    """Assert that two trees of results are equal, in their types too."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        types = [(x.shape, x.dtype, jax.typeof(x).weak_type) for x in (a, b)]
        assert types[0] == types[1], types
        compare(a, b, exact, rtol, atol)


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
