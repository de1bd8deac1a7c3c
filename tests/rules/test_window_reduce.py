"""Pooling and its gradients: any configuration against the unpartitioned run; what is sent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax import lax

from tests.oracle import (
    DEVICE_COUNTS,
    assignments,
    check,
    even_split,
    kinds,
    random_array,
    sent,
)
from tests.rules.test_window import SIZES, gathers, gradient, halo_only


def pool(init, op, size, stride=1, pad=(0, 0), base=1, dilation=1):
    """A reduction over windows of the last of 3 dims."""

    def fn(x):
        return lax.reduce_window(
            x,
            init,
            op,
            (1, 1, size),
            (1, 1, stride),
            [(0, 0), (0, 0), pad],
            (1, 1, base),
            (1, 1, dilation),
        )

    return fn


@pytest.mark.slow
def test_a_window_that_spans_the_input_is_reduced_in_parts():
    x = random_array((2, 3, 37))
    for init, op in [(0.0, lax.add), (-jnp.inf, lax.max), (jnp.inf, lax.min)]:
        for size, stride in [(37, 1), (33, 2), (6, 1)]:
            lowered = check(
                pool(init, op, size, stride),
                x[..., : size + 4 * (size == 33)],
                inputs=[even_split(3, 2, 8)],
            )
            assert kinds(lowered) == {"all_reduce": 1}


def test_max_pool_gradient_is_exact_and_exchanges_halos():
    """Ties included: the first of equal elements takes the gradient, also across tiles."""
    x = np.round(random_array((2, 3, 37)))
    fn = pool(-jnp.inf, lax.max, 3, 2, (1, 1))
    lowered = check(fn, x, inputs=[even_split(3, 2, 8)], exact=True)
    assert halo_only(lowered) == 2 * 3 * 4 * 6
    assert halo_only(check(gradient(fn), x, inputs=[even_split(3, 2, 8)], exact=True)) > 0


def test_the_gradient_of_a_maximum_sends_the_rows_under_its_windows():
    """A row each way for the maxima and for their gradients, and two to select in."""
    x = random_array((64, 4))

    def fn(x):
        return lax.reduce_window(x, -jnp.inf, lax.max, (3, 1), (1, 1), "SAME")

    low = check(gradient(fn), x, inputs=[even_split(2, 0, 8)], exact=True)
    assert halo_only(low) == 8 * x[:1].nbytes, low.collectives


REDUCERS = {
    "sum": (0, lax.add),
    "max": (-np.inf, lax.max),
    "min": (np.inf, lax.min),
    "prod": (1, lax.mul),
    "odd": (2, lambda a, b: a - b * 2),
}


@st.composite
def pools(draw):
    rank = draw(st.integers(1, 3))
    shape = [draw(st.sampled_from((*SIZES, 0))) for _ in range(rank)]
    size = [draw(st.sampled_from((1, 2, 3, 5, 13))) for _ in range(rank)]
    stride, base, dilation = ([draw(st.integers(1, 3)) for _ in range(rank)] for _ in range(3))
    pads = [(draw(st.integers(0, 4)), draw(st.integers(0, 4))) for _ in range(rank)]
    plain = draw(st.booleans())  # without dilation there are gradients
    if plain:
        base = dilation = [1] * rank
    devices = draw(st.sampled_from(DEVICE_COUNTS))
    split = [draw(assignments(rank, devices)) for _ in range(2)]
    name = draw(st.sampled_from(sorted(REDUCERS)))
    dtype = draw(st.sampled_from([jnp.float32, jnp.bfloat16, jnp.int32]))
    return name, dtype, shape, (size, stride, pads, base, dilation), plain, devices, split


def check_pool(case):
    name, dtype, shape, window, plain, devices, split = case
    init, op = REDUCERS[name]
    floats = jnp.issubdtype(dtype, jnp.floating)
    if not floats and not np.isfinite(init):
        init = jnp.iinfo(dtype).min if init < 0 else jnp.iinfo(dtype).max
    x = random_array(shape, dtype)

    def fn(x):
        return lax.reduce_window(x, np.asarray(init, dtype), op, *window)

    try:
        jax.eval_shape(fn, x)
    except (ValueError, TypeError):
        assume(False)
    exact = name in ("max", "min")
    how = {"devices": devices, "inputs": split[:1], "exact": exact, "rtol": 1e-4, "atol": 1e-4}
    lowered = check(fn, x, outputs=split[1:], **how)
    if split[1] is None:
        assert not gathers(lowered)
    if dtype == jnp.float32 and plain and name in ("sum", "max", "min"):
        check(gradient(fn), x, **(how | {"exact": False}))
    if dtype == jnp.float32 and name in ("max", "min"):  # select_and_gather_add
        tangent = random_array(shape, seed=1)
        check(lambda x, t: jax.jvp(fn, (x,), (t,)), x, tangent, **how)


@given(pools())
@settings(max_examples=6)
def test_any_pool(case):
    check_pool(case)


@pytest.mark.slow
@given(pools())
@settings(max_examples=300)
def test_any_pool_at_length(case):
    check_pool(case)


@pytest.mark.parametrize("op", [lax.max, lax.min])
@pytest.mark.parametrize("window", [3, 13])
def test_windows_of_complex_numbers(op, window):
    """Halos and parts of a window, with padding that is the least of all pairs."""
    parts = np.random.default_rng(0).integers(-1, 2, (2, 13, 2)).astype(np.float32)
    x = (parts[0] + 1j * parts[1]).astype(np.complex64)
    init = np.complex64(-np.inf if op is lax.max else np.inf)

    def pool(x):
        return lax.reduce_window(x, init, op, (window, 1), (1, 1), "VALID")

    check(pool, x, inputs=[even_split(2, 0, 8)], exact=True)


def test_rows_beyond_the_end_take_no_part_in_any_computation():
    """It has no identity: windows at both ends, and the padding of uneven tiles, are left out."""
    x = random_array((2, 3, 13))
    lowered = check(pool(1.0, lax.mul, 3, 1, (1, 2)), x, inputs=[even_split(3, 2, 8)])
    assert halo_only(lowered) > 0


def test_windows_over_most_rows_gather_them():
    """A gather sends each row once; halos, or rows for each device by itself, are more."""
    x = random_array((1, 2, 24))
    lowered = check(pool(1.0, lax.mul, 17), x, inputs=[even_split(3, 2, 8)])
    assert kinds(lowered) == {"all_gather": 1}
    assert sent(lowered) == 2 * 21 * 4


def test_an_element_of_a_window_is_added_by_one_device():
    """Windows of 37 rows, which begin in the padding or end there, on tiles of 6."""
    fn = pool(0.0, lax.add, 37, 2, (1, 2))
    low = check(fn, random_array((1, 1, 41)), inputs=[even_split(3, 2, 8)])
    assert kinds(low) == {"all_reduce": 1}
    narrow = check(pool(0.0, lax.add, 7), random_array((1, 1, 9)), inputs=[even_split(3, 2, 2)])
    assert "all_reduce" not in kinds(narrow)
