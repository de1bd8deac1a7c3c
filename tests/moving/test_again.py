"""What is narrow moves, and is made wide after it: reshards, and rows at the borders of tiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import gshard
from tests.oracle import assignments, check, even_split, kinds, random_array, sent

ROWS = even_split(2, 0, 8)


# ---------------------------------------------------------------- reshards


WIDENED = {
    "astype": lambda q, scale: q.astype(jnp.float32),
    "scaled": lambda q, scale: q.astype(jnp.float32) * scale,
    "shifted": lambda q, scale: (q.astype(jnp.float32) - 8.0) * scale[None],
    "in two steps": lambda q, scale: q.astype(jnp.bfloat16).astype(jnp.float32),
    "transposed": lambda q, scale: (q.astype(jnp.float32) * scale).T,
    "annotated": lambda q, scale: gshard.split(q.astype(jnp.float32), 0, 8) * scale,
}


@pytest.mark.parametrize("way", WIDENED)
def test_narrow_weights_are_gathered_and_then_made_wide(way):
    def fn(x, q, scale):
        wide = WIDENED[way](q, scale)
        return x @ (wide.T if way == "transposed" else wide)

    args = random_array((4096, 64)), random_array((64, 64), jnp.int8), random_array((64,))
    low = check(fn, *args, inputs=[ROWS, ROWS], rtol=1e-3, atol=1e-3)
    assert kinds(low) == {"all_gather": 1}
    assert sent(low) == 64 * 64 * 7 // 8


def test_what_is_made_narrow_is_gathered_so():
    args = random_array((4096, 64)), random_array((64, 64))
    low = check(
        lambda x, w: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16), *args, inputs=[ROWS, ROWS]
    )
    assert kinds(low) == {"all_gather": 1}
    assert sent(low) == 64 * 64 * 2 * 7 // 8


@pytest.mark.parametrize("dimensions", [None, (1, 0)])
def test_a_value_made_of_what_is_there_already_is_not_moved(dimensions):
    """The weight is gathered for a product; what is made of it for another one is made again."""

    def fn(x, w):
        return x @ w, x @ lax.reshape(jnp.sin(w), w.shape, dimensions)

    low = check(
        fn, random_array((4096, 64)), random_array((64, 64)), inputs=[ROWS, ROWS], rtol=1e-3
    )
    assert kinds(low) == {"all_gather": 1}


def test_a_row_that_is_repeated_is_gathered_once():
    def fn(x, bias):
        return gshard.replicate(jnp.broadcast_to(bias, (64, 64))), x

    low = check(fn, random_array((8, 8)), random_array((64,)), inputs=[None, even_split(1, 0, 8)])
    assert sent(low) == 64 * 4 * 7 // 8


@pytest.mark.parametrize("count", [64, 61])
@pytest.mark.parametrize("mode", ["clip", "fill"])
def test_rows_of_a_table_are_looked_up_again_at_the_borders_of_tiles(count, mode):
    """The number of one row is sent, and not the row."""

    def fn(table, numbers):
        rows = jnp.take(table, numbers, 0, mode=mode)
        return rows[1:] - rows[:-1]

    numbers = 7 * jnp.arange(count) % 35  # the table has 30 rows
    low = check(fn, random_array((30, 32)), numbers, inputs=[None, even_split(1, 0, 8)])
    assert kinds(low) == {"collective_permute": 1}
    assert sent(low) == numbers.itemsize


def test_narrow_rows_are_sent_before_their_other_dims_are_reshaped():
    """The rows are of a dim that the reshape keeps, beside another one that is split."""

    def fn(q):
        heads = q.astype(jnp.float32).reshape(*q.shape[:2], 4, 8)
        return heads[:, 1:] - heads[:, :-1]

    low = check(fn, random_array((6, 64, 32), jnp.int8), inputs=[np.arange(8).reshape(2, 4, 1)])
    assert kinds(low) == {"collective_permute": 1}
    assert sent(low) == 3 * 32


def test_three_dims_are_exchanged_narrow_and_then_transposed():
    def fn(q):
        return jnp.transpose(q.astype(jnp.float32), (1, 2, 0))

    splits = {"inputs": [even_split(3, 0, 8)], "outputs": [even_split(3, 0, 8)]}
    low = check(fn, random_array((8, 16, 32), jnp.int8), exact=True, **splits)
    assert kinds(low) == {"all_to_all": 1}
    assert sent(low) == 8 * 16 * 32 // 8 * 7 // 8


def test_scales_of_blocks_of_rows():
    """A scale for every 8 rows: the weights are reshaped on the way."""

    def fn(x, q, scale):
        blocks = q.reshape(32, 8, 256).astype(jnp.float32) * scale[:, None]
        return x @ blocks.reshape(256, 256)

    args = random_array((4096, 256)), random_array((256, 256), jnp.int8), random_array((32, 256))
    low = check(fn, *args, inputs=[ROWS, ROWS, ROWS], rtol=1e-3, atol=1e-2)
    assert set(kinds(low)) == {"all_gather"}
    assert sent(low) == (256 * 256 + 32 * 256 * 4) * 7 // 8


def test_weights_of_layers_in_a_scan():
    def fn(x, q):
        return lax.scan(lambda x, q: (jnp.tanh(x @ q.astype(jnp.float32) * 0.1), None), x, q)[0]

    args = random_array((4096, 32)), random_array((3, 32, 32), jnp.int8)
    low = check(fn, *args, inputs=[ROWS, even_split(3, 1, 8)], rtol=1e-3, atol=1e-3)
    assert sent(low) == 3 * 32 * 32 * 7 // 8


@st.composite
def widenings(draw):
    """Pointwise programs of narrow operands, and where operands and result are to be."""
    shape = tuple(draw(st.sampled_from([1, 4, 8, 13])) for _ in range(2))
    narrow = draw(st.sampled_from([jnp.int8, jnp.uint8, jnp.bool_, jnp.bfloat16, jnp.int16]))
    wide = draw(st.sampled_from([jnp.float32, jnp.int32]))
    steps = draw(st.lists(st.sampled_from(["scale", "flip", "turn", "add", "mask"]), max_size=3))

    def fn(q, scale):
        x = q.astype(wide)
        for step in steps:
            if step == "scale":
                x = x * scale.astype(wide)
            elif step == "flip":
                x = -x
            elif step == "turn":
                x = (x.T + jnp.asarray(1, wide)).T
            elif step == "add":
                x = x + q.astype(wide)
            else:
                x = jnp.where(q == 0, jnp.asarray(3, wide), x)
        return x

    inputs = [draw(assignments(2, 8)), draw(assignments(1, 8))]
    return fn, shape, narrow, inputs, [draw(assignments(2, 8))]


def any_widening(program):
    fn, shape, narrow, inputs, outputs = program
    args = random_array(shape, narrow), random_array(shape[1:])
    check(fn, *args, inputs=inputs, outputs=outputs)


@settings(max_examples=3)
@given(widenings())
def test_random_widenings(program):
    any_widening(program)


@pytest.mark.slow
@settings(max_examples=200)
@given(widenings())
def test_many_random_widenings(program):
    any_widening(program)


# ---------------------------------------------------------------- rows at the borders of tiles


def conv(x, kernel):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)


REPEATED = {
    "repeat": lambda x: jnp.repeat(jnp.repeat(x, 2, 1), 2, 2),
    "broadcast": lambda x: jnp.broadcast_to(
        x[:, :, None, :, None], (*x.shape[:2], 2, x.shape[2], 2, x.shape[3])
    ).reshape(x.shape[0], 2 * x.shape[1], 2 * x.shape[2], x.shape[3]),
    "then relu": lambda x: jax.nn.relu(jnp.repeat(jnp.repeat(x, 2, 2), 2, 1)),
}


@pytest.mark.parametrize("way", ["repeat", "broadcast", "then relu"])
def test_rows_are_sent_before_they_are_repeated(way):
    def fn(x, kernel):
        return conv(REPEATED[way](x), kernel)

    args = random_array((2, 16, 12, 4)), random_array((3, 3, 4, 5))
    low = check(fn, *args, inputs=[even_split(4, 1, 8)], rtol=1e-4, atol=1e-4)
    assert kinds(low) == {"collective_permute": 2}
    assert sent(low) == 2 * (2 * 12 * 4 * 4)


def test_rows_of_what_is_put_together_are_sent_each_by_itself():
    def fn(x, skip, kernel):
        return conv(jnp.concatenate([REPEATED["repeat"](x), skip], -1), kernel)

    args = random_array((1, 16, 12, 8)), random_array((1, 32, 24, 2)), random_array((3, 3, 10, 5))
    images = even_split(4, 1, 8)
    low = check(fn, *args, inputs=[images, images], rtol=1e-4, atol=1e-4)
    assert sent(low) == 2 * (12 * 8 * 4 + 24 * 2 * 4)


@st.composite
def upsampled(draw):
    """Windows over repeated rows: sizes, factors, dtypes, windows and splits of any kind."""
    rows, columns = draw(st.integers(1, 17)), draw(st.integers(1, 5))
    times = draw(st.sampled_from([1, 2, 3]))
    wide = draw(st.sampled_from([jnp.float32, jnp.bfloat16]))
    window = draw(st.integers(1, 5))
    stride = draw(st.integers(1, 2))
    cut = draw(st.booleans())

    def fn(x):
        y = jnp.repeat(x.astype(wide), times, 0)
        y = jnp.repeat(y, times, 1) * 2
        y = y[1:] if cut and y.shape[0] > 8 else y
        return lax.reduce_window(y, -jnp.inf, lax.max, (window, 1), (stride, 1), "SAME")

    narrow = draw(st.sampled_from([jnp.int8, jnp.bfloat16, jnp.float32]))
    return fn, random_array((rows, columns), narrow), [draw(assignments(2, 8, dims=[0]))]


def any_upsampling(program):
    fn, x, inputs = program
    check(fn, x, inputs=inputs, exact=True)


@settings(max_examples=3)
@given(upsampled())
def test_random_windows_over_repeated_rows(program):
    any_upsampling(program)


@pytest.mark.slow
@settings(max_examples=200)
@given(upsampled())
def test_many_random_windows_over_repeated_rows(program):
    any_upsampling(program)
