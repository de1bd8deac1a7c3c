"""Contractions and reductions over a split dim, in every dtype in which JAX has them."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import gshard
from tests.oracle import assert_same, run

ROWS, COLUMNS = 16, 6


def convolved(x):
    """A convolution that sums over rows, which are its channels."""
    return lax.conv(x[None], x[None, :, :2], (1,), "VALID")


def scattered(x, way):
    rows = jnp.arange(ROWS) % 3
    return getattr(jnp.zeros((3, COLUMNS), x.dtype).at[rows], way)(x)


def windows(x, name, start):
    reduce = getattr(lax, name)
    return lax.reduce_window(x, np.asarray(start, x.dtype), reduce, (3, 1), (2, 1), "SAME")


def ones_for_zeros(x):
    return jnp.where(x == jnp.zeros((), x.dtype), jnp.ones((), x.dtype), x)


CONTRACTIONS: dict[str, Callable] = {
    "matmul": lambda x: x.T @ x,
    "matrix and vector": lambda x: x.T @ x[:, 0],
    "einsum": lambda x: jnp.einsum("ki,kj->ij", x, x),
    "einsum with a batch": lambda x: jnp.einsum("kb,kb->b", x, x),
    "vdot": lambda x: jnp.vdot(x, x),
    "tensordot": lambda x: jnp.tensordot(x, x, 2),
    "inner": lambda x: jnp.inner(x.T, x.T),
    "wider": lambda x: lax.dot_general(
        x, x, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
    ),
    "convolution": convolved,
    "ragged_dot": lambda x: lax.ragged_dot(x.T, x[None], jnp.array([COLUMNS], jnp.int32)),
    "negated": lambda x: ~(x.T @ x),
}
REDUCTIONS: dict[str, Callable] = {
    "sum": lambda x: x.sum(0),
    "sum of all": lambda x: jnp.sum(x),
    "sum in its dtype": lambda x: jnp.sum(x, axis=0, dtype=x.dtype),
    "product": lambda x: jnp.prod(ones_for_zeros(x), axis=0),
    "max": lambda x: x.max(0),
    "min": lambda x: x.min(0),
    "any": lambda x: x.any(0),
    "all": lambda x: x.all(0),
    "argmax": lambda x: x.argmax(0),
    "argmin": lambda x: x.argmin(0),
    "mean": lambda x: x.mean(0),
    "variance": lambda x: x.var(0),
    "norm": lambda x: jnp.linalg.norm(x, axis=0),
    "count_nonzero": lambda x: jnp.count_nonzero(x, axis=0),
    "range": lambda x: jnp.ptp(x, axis=0),
    "nansum": lambda x: jnp.nansum(x, axis=0),
    "logsumexp": lambda x: jax.nn.logsumexp(x.astype(jnp.float32), axis=0).astype(x.dtype),
    "trace": lambda x: jnp.trace(x),
    "reduce_and": lambda x: lax.reduce_and(x, (0,)),
    "reduce_or": lambda x: lax.reduce_or(x, (0,)),
    "reduce_xor": lambda x: lax.reduce_xor(x, (0,)),
    "reduce with add": lambda x: lax.reduce(x, np.zeros((), x.dtype), lax.add, (0,)),
    "reduce with max": lambda x: lax.reduce(x, np.zeros((), x.dtype), lax.max, (0,)),
    "cumsum": lambda x: jnp.cumsum(x, axis=0),
    "cumulative sum in its dtype": lambda x: lax.cumsum(x, axis=0),
    "cumprod": lambda x: lax.cumprod(ones_for_zeros(x), axis=0),
    "cummax": lambda x: lax.cummax(x, axis=0),
    "cummin": lambda x: lax.cummin(x, axis=0),
    "sort": lambda x: jnp.sort(x, axis=0),
    "windows summed": lambda x: windows(x, "add", 0),
    "windows' maxima": lambda x: windows(x, "max", 0),
    "scatter add": lambda x: scattered(x, "add"),
    "scatter mul": lambda x: scattered(x, "mul"),
    "scatter min": lambda x: scattered(x, "min"),
    "scatter max": lambda x: scattered(x, "max"),
    "scatter set": lambda x: scattered(x, "set"),
    "segment_sum": lambda x: jax.ops.segment_sum(x, jnp.arange(ROWS) // 3, 6),
}

QUICK = ["bool", "int8"]
WIDE = ["int64", "uint64", "float64", "complex128"]
NARROW = [
    name
    for name in (
        # XLA itself corrupts memory when it sorts integers of 2 bits on a CPU.
        "int4", "uint4", "float4_e2m1fn", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz",
        "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
    )
    if hasattr(ml_dtypes, name)
]  # fmt: skip
USUAL = [
    "bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "bfloat16", "float16",
    "float32", "complex64",
]  # fmt: skip


def few_ones(dtype) -> np.ndarray:
    """Zeros and, in every column, one to three ones: all sums and products are exact."""
    rng = np.random.default_rng(0)
    x = np.zeros((ROWS, COLUMNS), np.int8)
    for column in range(COLUMNS):
        x[rng.permutation(ROWS)[: 1 + column % 3], column] = 1
    return x.astype(jnp.dtype(dtype))


@functools.cache
def allowed(dtype: str, wide: bool) -> dict[str, Callable]:
    """The operators that `jax.jit` has in this dtype."""
    x, found = few_ones(dtype), {}
    for name, fn in (CONTRACTIONS | REDUCTIONS).items():
        try:
            jax.eval_shape(fn, x)
            jax.block_until_ready(jax.jit(fn)(x))
        except Exception:
            continue
        found[name] = fn
    return found


def check_table(dtype: str, rows: int) -> None:
    """All operators as one program; `rows` of the results are split too, if there are as many."""
    x, table = few_ones(dtype), allowed(dtype, jax.config.jax_enable_x64)
    wanted = {name: jax.jit(fn)(x) for name, fn in table.items()}
    assert len(table) > len(CONTRACTIONS)

    def marked(x):
        x = gshard.split(x, 0, 8)
        results = {name: fn(x) for name, fn in table.items()}
        return {k: gshard.split(y, 0, rows) if y.ndim else y for k, y in results.items()}

    got = run(gshard.jit(marked, devices=jax.devices()[:8]), x)
    for name in table:
        try:
            assert_same(got[name], wanted[name])
        except AssertionError as error:
            raise AssertionError(f"{name} of {dtype}: {error}") from error


@pytest.mark.parametrize("dtype", QUICK)
def test_every_operator_in_some_dtypes(dtype):
    check_table(dtype, 6)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("dtype", [*USUAL, *NARROW])
def test_every_operator_in_every_dtype(dtype, rows):
    check_table(dtype, rows)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", WIDE)
def test_every_operator_in_64_bits(dtype):
    with jax.enable_x64(True):
        check_table(dtype, 6)
