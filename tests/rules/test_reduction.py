"""Reductions: kept dims are free, reduced dims combine; any computation, any init value."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import gshard
from tests.oracle import (
    DEVICE_COUNTS,
    assignments,
    check,
    check_grad,
    even_split,
    kinds,
    random_array,
)

KINDS = {
    "sum": (jnp.sum, ["float32", "int32", "bfloat16", "complex64"]),
    "prod": (jnp.prod, ["float32", "int32"]),
    "max": (jnp.max, ["float32", "int32", "bool", "uint8", "complex64"]),
    "min": (jnp.min, ["float32", "int8", "bool", "complex64"]),
    "all": (jnp.all, ["bool"]),
    "any": (jnp.any, ["bool"]),
    "and": (lambda x, axis: lax.reduce_and(x, axis), ["int32", "uint8"]),
    "or": (lambda x, axis: lax.reduce_or(x, axis), ["int32", "uint8"]),
    "xor": (lambda x, axis: lax.reduce_xor(x, axis), ["int32", "bool"]),
}


@st.composite
def reductions(draw):
    name = draw(st.sampled_from(sorted(KINDS)))
    dtype = draw(st.sampled_from(KINDS[name][1]))
    shape = tuple(draw(st.integers(1, 9)) for _ in range(draw(st.integers(1, 3))))
    axes = draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))
    devices = draw(st.sampled_from(DEVICE_COUNTS))
    outputs = [draw(assignments(len(shape) - len(axes), devices))]
    return (
        name,
        dtype,
        shape,
        tuple(sorted(axes)),
        devices,
        [draw(assignments(len(shape), devices))],
        outputs,
    )


@given(reductions())
def test_any_split(case):
    name, dtype, shape, axes, devices, inputs, outputs = case
    reduce, _ = KINDS[name]
    exact = name not in ("sum", "prod") or dtype == "int32"
    x = random_array(shape, dtype)
    how = {"devices": devices, "inputs": inputs, "outputs": outputs}
    check(lambda x: reduce(x, axis=axes), x, exact=exact, atol=1e-4, **how)
    if dtype == "float32":
        check_grad(lambda x: reduce(x, axis=axes), x, atol=1e-4, **how)


@pytest.mark.parametrize("reduce", [jnp.max, jnp.min, jnp.sum, jnp.argmax, jnp.argmin])
def test_nan_and_infinity(reduce):
    """A NaN wins wherever it stands; padding, which is NaN here, never does."""
    x = random_array((13, 4))
    x[5, 0], x[:, 1], x[3, 2], x[12, 2] = np.nan, -np.inf, np.inf, -np.inf
    check(lambda x: reduce(x, axis=0), x, inputs=[even_split(2, 0, 8)])


def test_what_it_costs():
    x = random_array((16, 12))
    rows, columns = even_split(2, 0, 8), even_split(2, 1, 4)
    assert check(lambda x: x.max(1), x, inputs=[rows]).collectives == []
    (found,) = check(lambda x: x.max(0), x, inputs=[rows]).collectives
    assert (found.kind, found.bytes) == ("all_reduce", 2 * 12 * 4 * 7 // 8)
    scattered = check(
        lambda x: x.sum(0),
        random_array((16, 4096)),
        inputs=[rows],
        outputs=[np.arange(8)],
        atol=1e-4,
    )
    assert kinds(scattered) == {"reduce_scatter": 1}
    assert check(lambda x: x.sum(0), x, inputs=[columns]).collectives == []


def test_dims_of_which_a_tile_has_one_row_are_left_out():
    def fn(x, y):
        return jnp.sum(gshard.split(x, 0, 8) * y, 2)

    low = check(fn, random_array((8, 5, 3, 4)), random_array((8, 5, 3, 4)), rtol=1e-4, atol=1e-4)
    (reduce,) = [line for line in low.as_text().splitlines() if " = reduce_sum" in line]
    assert "f32[5,4] = reduce_sum[axes=(1,)" in reduce


@pytest.mark.parametrize("init", [0.0, 5.0])
@pytest.mark.parametrize("split", [even_split(2, 0, 8), np.arange(8).reshape(4, 2)])
def test_any_computation_and_any_init_value(init, split):
    """The init value takes part once, whatever it is; nothing is known of an identity."""

    def fn(x):
        return lax.reduce(x, np.float32(init), lambda a, b: jnp.hypot(a, b), (0,))

    check(fn, random_array((13, 5)), inputs=[split])


def test_several_operands_at_once():
    """The largest value and where it stands, as a reduction of pairs."""

    def best(a, b):
        (x, i), (y, j) = a, b
        take = (x > y) | ((x == y) & (i < j))
        return jnp.where(take, x, y), jnp.where(take, i, j)

    def fn(x):
        numbers = lax.broadcasted_iota(jnp.int32, x.shape, 0)
        return lax.reduce((x, numbers), (np.float32(-np.inf), np.int32(99)), best, (0,))

    check(fn, random_array((13, 5)), inputs=[even_split(2, 0, 8)], exact=True)


@pytest.mark.parametrize("reduce", [jnp.max, jnp.min])
def test_complex_numbers_compare_by_real_then_imaginary_part(reduce):
    """In JAX's order, -0.0 as 0.0; padding must not win. Two AllReduces of half the bytes each.

    (The second depends on the first: few numbers are gathered instead, with one latency.)
    """
    rng = np.random.default_rng(0)
    parts = rng.integers(-1, 2, (2, 13, 4096)).astype(np.float32) * np.float32(-1)
    x = (parts[0] + 1j * parts[1]).astype(np.complex64)
    lowered = check(lambda x: reduce(x, axis=0), x, inputs=[even_split(2, 0, 8)], exact=True)
    assert kinds(lowered) == {"all_reduce": 2}


@pytest.mark.parametrize("tiles", [3, 5, 7])
def test_devices_without_a_part_have_the_result_too(tiles):
    """Tiles that do not divide the devices: the first device may be one without."""
    x = random_array((15, 2))
    assigned = np.arange(8)[::-1][:tiles].reshape(tiles, 1)

    def fn(x):
        largest = lax.reduce(x, -jnp.inf, lambda a, b: jnp.maximum(a, b) + 0 * a, (0,))
        return jnp.argmin(x, 0), jnp.argmax(x), largest

    check(fn, x, inputs=[assigned])
