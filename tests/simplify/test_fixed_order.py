"""`reproducible=True`: the bits that a slow oracle prescribes, on any devices, however sharded."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import gshard
from gshard.simplify import fixed_functions, fixed_order
from tests.oracle import annotated, assert_same, assignments, even_split, random_array, run, sent

COUNTS = (1, 2, 3, 4, 6, 8)


# ---------------------------------------------------------------- the slow oracle, in NumPy


def tree(parts: list[np.ndarray]) -> np.ndarray:
    """Neighbours are added, then neighbours of those."""
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def folded(parts: list[np.ndarray]) -> np.ndarray:
    """The first half is added to the second; an odd one waits."""
    while len(parts) > 1:
        half = len(parts) // 2
        both = [a + b for a, b in zip(parts[:half], parts[half : 2 * half], strict=True)]
        parts = [*both, *parts[2 * half :]]
    return parts[0]


def leaves(x: np.ndarray, axis: int) -> list[np.ndarray]:
    return np.split(x, np.gcd(x.shape[axis], 8), axis)


def summed(x: np.ndarray, axis: int) -> np.ndarray:
    """A sum over one dim."""
    rows = [[np.take(leaf, i, axis) for i in range(leaf.shape[axis])] for leaf in leaves(x, axis)]
    return tree([folded(row) for row in rows])


def product(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x @ y: a chain of multiply-adds for each leaf. Products of floats are exact as doubles."""

    def chain(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        total = np.zeros((a.shape[0], b.shape[1]), np.float32)
        for i in range(a.shape[1]):
            exact = a[:, i : i + 1].astype(np.float64) * b[i : i + 1].astype(np.float64)
            total = (exact + total).astype(np.float32)
        return total

    dtype = x.dtype
    parts = zip(leaves(x, 1), leaves(y, 0), strict=True)
    return tree([chain(a, b).astype(dtype) for a, b in parts])


def bits(fn, *args, devices: int, inputs=(), outputs=()) -> jax.Array:
    step = gshard.jit(
        annotated(fn, inputs, outputs), devices=jax.devices()[:devices], reproducible=True
    )
    return run(step, *args, exact=True)


# ---------------------------------------------------------------- sums and products


@settings(max_examples=6, deadline=None)
@given(st.data())
def test_a_sum_has_the_order_of_its_tree(data):
    sizes = st.sampled_from((1, 3, 8, 12, 24, 40))
    shape = tuple(data.draw(st.lists(sizes, min_size=2, max_size=3)))
    axis = data.draw(st.integers(0, len(shape) - 1))
    devices = data.draw(st.sampled_from(COUNTS[1:]))
    x = random_array(shape)
    where = [data.draw(assignments(len(shape), devices))]
    after = [data.draw(assignments(len(shape) - 1, devices))]
    got = bits(lambda x: jnp.sum(x, axis), x, devices=devices, inputs=where, outputs=after)
    np.testing.assert_array_equal(np.asarray(got), summed(x, axis))


@settings(max_examples=6, deadline=None)
@given(st.data())
def test_a_product_is_a_tree_of_chains(data):
    m, k, n = (
        data.draw(st.sampled_from(s)) for s in ((1, 3, 8, 24), (1, 6, 16, 24, 96), (1, 5, 16))
    )
    dtype = data.draw(st.sampled_from((jnp.float32, jnp.bfloat16)))
    devices = data.draw(st.sampled_from(COUNTS[1:]))
    x, y = random_array((m, k), dtype), random_array((k, n), dtype, seed=1)
    where = [data.draw(assignments(2, devices)) for _ in range(2)]
    after = [data.draw(assignments(2, devices))]
    got = bits(jnp.matmul, x, y, devices=devices, inputs=where, outputs=after)
    assert_same(got, jnp.asarray(product(x, y)), exact=True)


def test_subtrees_are_exchanged_in_as_many_bytes_as_an_all_reduce():
    x, y = random_array((16, 64)), random_array((64, 24))
    where = [even_split(2, 1, 8), even_split(2, 0, 8)]

    def lowered(outputs=()):
        fn = annotated(jnp.matmul, where, outputs)
        return gshard.jit(fn, devices=8, reproducible=True).lower(x, y)

    size = 16 * 24 * 4
    assert [c.kind for c in lowered().collectives] == ["all_to_all", "all_gather"]
    assert sent(lowered()) == 2 * size * 7 // 8
    split = lowered([even_split(2, 0, 8)])
    assert [c.kind for c in split.collectives] == ["all_to_all"]
    assert sent(split) == size * 7 // 8


# ---------------------------------------------------------------- what else has an order


def on_all(fn, *args, dims: int = 1) -> None:
    """Assert equal bits on all counts of devices, the first operand split along its dims."""
    alone = gshard.jit(fn, devices=jax.devices()[:1], reproducible=True)(*args)
    for devices in (3, 8):
        for dim in range(dims):
            where = [even_split(np.ndim(args[0]), dim, devices)]
            assert_same(bits(fn, *args, devices=devices, inputs=where), alone, exact=True)


def test_a_multiplication_is_not_fused_with_an_addition():
    x, y, z = (random_array((40,), seed=i) for i in range(3))
    got = gshard.jit(lambda x, y, z: x * y + z, reproducible=True)(x, y, z)
    np.testing.assert_array_equal(np.asarray(got), x * y + z)


def test_a_logarithm_is_one_wherever_its_element_is():
    edges = [0.0, -1.0, np.inf, np.nan, 1.0, 0.99999994, 3e38, 1.1754944e-38]
    x = np.concatenate([np.abs(random_array((104 - len(edges),))), np.float32(edges)])
    got = gshard.jit(jnp.log, devices=jax.devices()[:1], reproducible=True)(x)
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(np.asarray(got), np.log(x.astype(np.float64)), rtol=2e-7)
    on_all(jnp.log, x)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (jnp.cumsum(x, 0), jnp.prod(x, 0)),
        lambda x: lax.cumlogsumexp(x[:6], reverse=True),
        lambda x: jnp.zeros((5, 3)).at[jnp.arange(24) % 5].add(x * x),
        lambda x: jax.nn.softmax(x, 0) * jnp.var(x),
        lambda x: lax.scan(lambda c, row: (c * 0.5 + row @ row, c), jnp.float32(0), x)[1],
    ],
    ids=["cumsum and prod", "cumlogsumexp", "scatter", "softmax", "scan"],
)
def test_operators_that_add_have_one_order(fn):
    on_all(fn, random_array((24, 3)))


def test_random_numbers_depend_on_the_place_alone():
    def draw(x):
        keep = jax.random.bernoulli(jax.random.key(3), 0.7, x.shape)
        return jnp.where(keep, x, 0), jax.random.normal(jax.random.key(4), x.shape) + x

    on_all(draw, random_array((24, 4)))


def test_a_training_step_has_the_same_bits_on_any_devices():
    x, w = random_array((24, 8)), random_array((8, 16), seed=1)

    def loss(w, x):
        h = jax.nn.gelu(x @ w)
        return jnp.mean(jax.nn.logsumexp((h - h.mean(-1, keepdims=True)) @ w.T, -1))

    def step(x, w):
        value, slope = jax.value_and_grad(loss)(w, x)
        return value, w - 0.1 * slope

    alone = gshard.jit(step, devices=jax.devices()[:1], reproducible=True)(x, w)
    for devices in (2, 3, 8):
        where = [even_split(2, 0, devices), even_split(2, 1, devices) if devices % 3 else None]
        got = gshard.jit(
            annotated(step, where), devices=jax.devices()[:devices], reproducible=True
        )(x, w)
        assert_same(got, alone, exact=True)


# ---------------------------------------------------------------- refusals

REFUSED = {
    "all_gather", "all_gather_invariant", "all_to_all", "approx_top_k", "auto_to_manual",
    "cholesky_update", "conv_general_dilated", "custom_partitioning", "ffi_call", "fft", "geqp3",
    "grouped_dot", "lower_named_axes", "manual_collective", "manual_to_auto", "ormqr",
    "pallas_call", "pbroadcast", "pmax", "pmin", "ppermute", "psum", "psum_invariant", "put_rows",
    "ragged_all_to_all", "ragged_dot_general", "reduce", "reduce_scatter", "reduce_window",
    "reduce_window_sum", "ring_pass", "rng_uniform", "over_groups", "scatter_mul",
    "select_and_gather_add", "select_and_scatter", "select_and_scatter_add", "symmetric_product",
    "take_rows", "triangular_solve", "tridiagonal_solve", "visits",
}  # fmt: skip


def test_every_operator_of_floats_has_an_order_or_is_refused():
    known = fixed_order._EXACT | fixed_order._ROUNDED | set(fixed_functions.FUNCTIONS)
    known |= {primitive.name for primitive in fixed_order._REWRITES}
    known |= {
        "addupdate", "call", "closed_call", "composite", "cond", "custom_jvp_call",
        "custom_vjp_call", "custom_vmap_call", "get", "jit", "linear_solve", "remat", "scan",
        "scatter_add", "scatter_max", "scatter_min", "shard_map", "swap", "while",
    }  # fmt: skip
    of_integers = {
        "after_all", "axis_index", "clz", "eq", "eq_to", "ge", "gt", "iota_2x32_shape", "le",
        "le_to", "lt", "lt_to", "lu_pivots_to_permutation", "ne", "not", "or", "partition_id",
        "platform_index", "population_count", "reduce_and", "reduce_or", "reduce_xor",
        "rng_bit_generator", "row_of_device", "shift_left", "shift_right_arithmetic",
        "shift_right_logical", "threefry2x32", "xor",
    }  # fmt: skip
    page = Path(__file__).parents[2] / "docs/reference/operators.md"  # which follows the rules
    names = set(re.findall(r"^\| [`*]([\w-]+)[`*] \|", page.read_text(), re.MULTILINE))
    assert len(names) > 150
    assert names - known - of_integers <= REFUSED


def test_what_has_no_order_is_refused_with_its_line():
    def fn(x):
        return jnp.fft.fft(x)

    with pytest.raises(ValueError, match=r"test_fixed_order.py:\d+: fft has no fixed order"):
        gshard.jit(fn, reproducible=True)(np.ones(8, np.complex64))
    with pytest.raises(ValueError, match="partitioner is 'xla'"):
        gshard.jit(fn, reproducible=True, partitioner="xla")
