"""Cumulative operators: a parallel prefix along the split dim that moves one row per device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import gshard
from tests.oracle import (
    DEVICE_COUNTS,
    SIZES,
    assignments,
    check,
    check_grad,
    even_split,
    kinds,
    random_array,
    sent,
)

OPS = {
    "cumsum": lax.cumsum,
    "cumprod": lax.cumprod,
    "cummax": lax.cummax,
    "cummin": lax.cummin,
    "cumlogsumexp": lax.cumlogsumexp,
}


def all_ops(axis: int, reverse: bool, dtype):
    """Every operator in one program."""
    floats = jnp.issubdtype(dtype, jnp.floating)

    def fn(x):
        return [
            op(x, axis, reverse) for name, op in OPS.items() if floats or name != "cumlogsumexp"
        ]

    return fn


@st.composite
def cases(draw):
    rank = draw(st.integers(1, 3))
    shape = tuple(draw(st.sampled_from((*SIZES, 0))) for _ in range(rank))
    devices = draw(st.sampled_from(DEVICE_COUNTS))
    split = [draw(assignments(rank, devices)) for _ in range(2)]
    return shape, draw(st.integers(0, rank - 1)), draw(st.booleans()), devices, split


@given(cases(), st.sampled_from((np.float32, np.int8, np.uint32, jnp.bfloat16)))
def test_any_split(case, dtype):
    shape, axis, reverse, devices, (first, last) = case
    x = random_array(shape, dtype)
    fn = all_ops(axis, reverse, dtype)
    check(fn, x, devices=devices, inputs=[first], outputs=[last], rtol=1e-4)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("reverse", [False, True])
def test_one_row_per_device(name, reverse):
    x = random_array((61, 4, 16))
    low = check(
        lambda x: OPS[name](x, 0, reverse),
        x,
        inputs=[even_split(3, 0, 8)],
        outputs=[even_split(3, 0, 8)],
        exact=name in ("cummax", "cummin"),
        rtol=1e-4,
    )
    assert kinds(low) == {"all_gather": 1}
    assert sent(low) == 7 * 4 * 16 * 4  # a row of 4 x 16 floats to each of the others
    assert "the totals of 8 tiles" in low.collectives[0].reason


@pytest.mark.parametrize("name", OPS)
def test_other_dims_are_free(name):
    x = random_array((13, 6))
    low = check(lambda x: OPS[name](x, 1), x, inputs=[even_split(2, 0, 8)], rtol=1e-4)
    assert sent(low) == 0


@pytest.mark.slow
def test_special_values():
    x = np.array([-np.inf, -np.inf, 3e38, 1e-38, np.nan, 0.0, -0.0, np.inf, 2.0], np.float32)
    for values in (x, x[:4], x[[7, 1, 7]], np.full(9, -np.inf, np.float32)):
        for reverse in (False, True):
            check(
                all_ops(0, reverse, np.float32),
                values,
                devices=3,
                inputs=[even_split(1, 0, 3)],
                rtol=1e-6,
            )


def test_large_numbers_do_not_overflow():
    x = np.linspace(-1e4, 1e4, 40, dtype=np.float32)
    check(lambda x: lax.cumlogsumexp(x), x, inputs=[even_split(1, 0, 8)], rtol=1e-6)


@pytest.mark.parametrize("name", OPS)
def test_gradients(name):
    x = random_array((7, 3)) + 2.0
    check_grad(lambda x: OPS[name](x, 0), x, devices=3, inputs=[even_split(2, 0, 3)], rtol=1e-3)


def test_associative_scan():
    x = random_array((13, 2))
    check(
        lambda x: lax.associative_scan(lambda a, b: a * b + a + b, x),
        x,
        devices=4,
        inputs=[even_split(2, 0, 4)],
        rtol=1e-3,
    )


def test_the_program_does_not_grow_with_the_devices():
    sizes = set()
    for devices in (4, 64):
        step = gshard.jit(lambda x, d=devices: lax.cumsum(gshard.split(x, 0, d)), devices=devices)
        sizes.add(step.lower(jax.ShapeDtypeStruct((1024, 3), np.float32)).num_equations)
    assert len(sizes) == 1
