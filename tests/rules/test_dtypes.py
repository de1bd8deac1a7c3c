"""Contractions and reductions over a split dim, in every dtype in which JAX has them."""

import functools
import subprocess
import sys
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
PLACES = np.array([4, 15, 0, 9, 4])


def convolved(x):
    """A convolution that sums over rows, which are its channels."""
    return lax.conv(x[None], x[None, :, :2], (1,), "VALID")


def scattered(x, way):
    """Into zeros; into ones in a type without a zero, since XLA drops NaN in some programs alone:
    `jax.jit` of a minimum has it only where the NaN is a constant of the program."""
    rows, start = jnp.arange(ROWS) % 3, jnp.ones if x.dtype == SCALES else jnp.zeros
    return getattr(start((3, COLUMNS), x.dtype).at[rows], way)(x)


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
MOVES: dict[str, Callable] = {
    "take": lambda x: jnp.take(x, PLACES, axis=0),
    "take or fill": lambda x: jnp.take(x, PLACES * 5, axis=0, mode="fill", fill_value=1),
    "take along": lambda x: jnp.take_along_axis(x, PLACES[:, None] + jnp.zeros((1, 6), int), 0),
    "set": lambda x: x.at[PLACES].set(x[:5]),
    "set one": lambda x: x.at[3].set(x[7]),
    "set at unknown": lambda x: x.at[PLACES[2] % 3].set(x[7]),
    "scattered": lambda x: scattered(x, "set"),
    "one row": lambda x: lax.dynamic_slice_in_dim(x, PLACES[1], 3),
    "one row updated": lambda x: lax.dynamic_update_slice_in_dim(x, x[:3], PLACES[1], 0),
    "slice": lambda x: x[3:9],
    "strides": lambda x: x[1::3],
    "pad": lambda x: lax.pad(x, x[0, 0], ((2, 3, 1), (0, 1, 0))),
    "concatenate": lambda x: jnp.concatenate([x[:5], x, x[2:3]]),
    "roll": lambda x: jnp.roll(x, 3, axis=0),
    "reverse": lambda x: x[::-1],
    "transpose": lambda x: x.T,
    "reshape": lambda x: x.reshape(12, 8),
    "flat": lambda x: x.reshape(-1)[:13],
    "repeat": lambda x: jnp.repeat(x, 3, axis=0),
    "stack": lambda x: jnp.stack([x, x[::-1]], axis=1),
    "broadcast": lambda x: jnp.broadcast_to(x[3:4], x.shape),
    "where": lambda x: jnp.where(PLACES[0] > 1, x, x[::-1]),
    "scan": lambda x: lax.scan(lambda c, row: (row, c), x[0], x)[1],
    "loop": lambda x: lax.fori_loop(0, 3, lambda i, x: jnp.roll(x, 1, axis=0), x),
    "cond": lambda x: lax.cond(PLACES[0] > 1, lambda x: x[::-1], lambda x: x, x),
    "bits": lambda x: lax.bitcast_convert_type(x, jnp.uint8),
    "wider": lambda x: x.astype(jnp.float32),
    "and back": lambda x: (x.astype(jnp.float32) * 2).astype(x.dtype),
    "same": lambda x: x == x[::-1],
    "less": lambda x: x < x[::-1],
}

OPERATORS = {
    f"{family}: {name}": fn
    for family, table in (
        ("contraction", CONTRACTIONS), ("reduction", REDUCTIONS), ("move", MOVES)
    )
    for name, fn in table.items()
}  # fmt: skip
# A type without a zero, and the operators that would use one.
QUICK = {"float8_e8m0fnu": ["move: take", "move: set", "reduction: scatter max"]}
# XLA corrupts memory when it sorts these on a CPU, and has products and sums of some shapes alone.
TINY = ["int1", "uint1", "int2", "uint2"]
# Beyond its largest number, 6, or between its numbers: every order of a sum rounds otherwise.
ROUNDED = {("float4_e2m1fn", f"reduction: {name}") for name in ("sum of all", "variance")}
WIDE = ["int64", "uint64", "float64", "complex128"]
SCALES = "float8_e8m0fnu"  # powers of two: it has neither a zero nor a sign
NARROW = sorted(  # every type of ml_dtypes that JAX has arrays of
    name
    for name in dir(ml_dtypes)
    if name not in ("bfloat16", "finfo", "iinfo") and ("float" in name or "int" in name)
    if hasattr(jnp, name) and "float6" not in name  # XLA aborts: it has no arrays of them
)
USUAL = [
    "bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "bfloat16", "float16",
    "float32", "complex64",
]  # fmt: skip


def few_ones(dtype) -> np.ndarray:
    """Zeros and, in every column, one to three ones: all sums and products are exact.

    Ones and twos in a type that has no zero.
    """
    rng = np.random.default_rng(0)
    x = np.zeros((ROWS, COLUMNS), np.int8)
    for column in range(COLUMNS):
        x[rng.permutation(ROWS)[: 1 + column % 3], column] = 1
    return (x + (dtype == SCALES)).astype(jnp.dtype(dtype))


def has(fn: Callable, x: np.ndarray) -> bool:
    """Whether `jax.jit` runs an operator."""
    try:
        jax.eval_shape(fn, x)
        jax.block_until_ready(jax.jit(fn)(x))
    except Exception:
        return False
    return True


def try_all(dtype: str, names: list[str]) -> None:
    """Print the operators that `jax.jit` runs, each as soon as that is known."""
    for name in names:
        print(f"?{name}", flush=True)
        if has(OPERATORS[name], few_ones(dtype)):
            print(name, flush=True)


def tried(dtype: str, names: list[str]) -> list[str]:
    """The same, asked of another process: for some types XLA ends the process on some machines."""
    found = []
    while names:
        program = f"from tests.rules import test_dtypes as t\nt.try_all({dtype!r}, {names!r})"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        lines = done.stdout.split("\n")[:-1]
        asked = [line[1:] for line in lines if line.startswith("?")]
        assert asked, done.stderr
        found += [line for line in lines if not line.startswith("?")]
        names = names[len(asked) :]
    return found


@functools.cache
def allowed(dtype: str, wide: bool) -> dict[str, Callable]:
    """The operators that `jax.jit` has in this dtype."""
    names = [
        name
        for name in OPERATORS
        if (dtype not in TINY or name.startswith("move")) and (dtype, name) not in ROUNDED
    ]
    if dtype in NARROW:
        names = tried(dtype, names)
    else:
        names = [name for name in names if has(OPERATORS[name], few_ones(dtype))]
    return {name: OPERATORS[name] for name in names}


def check_table(dtype: str, rows: int) -> None:
    """All operators as one program; `rows` of the results are split too, if there are as many."""
    table = allowed(dtype, jax.config.jax_enable_x64)
    if not table:
        pytest.skip(f"jax.jit has no operators on {dtype}")
    assert len(table) >= len(MOVES) - 3
    check_operators(table, dtype, rows)


def check_operators(table: dict[str, Callable], dtype: str, rows: int) -> None:
    x = few_ones(dtype)
    wanted = {name: jax.jit(fn)(x) for name, fn in table.items()}

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
def test_operators_in_some_dtypes(dtype):
    check_operators({name: OPERATORS[name] for name in QUICK[dtype]}, dtype, 6)


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
