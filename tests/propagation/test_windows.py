"""Windows of convolutions and pools are computed in the tiles of the tensors that read them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from tests.oracle import check, even_split, random_array, sent

NUMBERS = ("NHWC", "HWIO", "NHWC")
X, KERNEL = random_array((2, 64, 20, 4)), random_array((3, 3, 4, 4), seed=1)


def test_gradients_of_convolutions_of_padded_tensors_send_border_rows():
    """Two rows of both layers, and two of the gradient; and the gradient of the kernel."""

    def two(kernel, x):
        def layer(y):
            q = jnp.pad(y, ((0, 0), (1, 1), (1, 1), (0, 0)))
            return jax.nn.relu(
                lax.conv_general_dilated(q, kernel, (1, 1), "VALID", dimension_numbers=NUMBERS)
            )

        return (layer(layer(x)) ** 2).mean()

    low = check(jax.value_and_grad(two), KERNEL, X, inputs=[None, even_split(4, 1, 8)], rtol=1e-4)
    assert sent(low) == 6 * X[:, :1].nbytes + 2 * 7 / 8 * KERNEL.nbytes + 7, low.collectives


# How a tensor is padded, and how many rows more the gradient sends.
PADDED = {
    "below": (lambda q: jnp.concatenate([q, q[:, -1:], q[:, -1:] * 0], 1), 0),
    "edge": (lambda q: jnp.pad(q, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="edge"), 0),
    "reflect": (lambda q: jnp.pad(q, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="reflect"), 0),
    "symmetric": (lambda q: jnp.pad(q, ((0, 0), (1, 1), (0, 0), (0, 0)), mode="symmetric"), 0),
    "wrap": (lambda q: jnp.pad(q, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="wrap"), 2),
    "circle": (lambda q: jnp.concatenate([q[:, -1:], q, q[:, :1]], 1), 2),
}


@pytest.mark.parametrize("name", PADDED)
@pytest.mark.parametrize("rows", [64, 61])
def test_rows_at_borders_are_computed_in_the_tiles_that_have_them(name, rows):
    """Two rows of the tensor, two of the gradient; around a circle, two that go around."""
    pad, more = PADDED[name]

    def loss(x, kernel):
        y = lax.conv_general_dilated(pad(x), kernel, (1, 1), "VALID", dimension_numbers=NUMBERS)
        return jnp.sum(jnp.tanh(y))

    x = X[:, :rows]
    how = {"inputs": [even_split(4, 1, 8)], "rtol": 1e-4, "atol": 1e-4}
    low = check(jax.grad(loss, (0, 1)), x, KERNEL, **how)
    if rows == 64:
        assert sent(low) <= (4 + more) * x[:, :1].nbytes + 1.1 * 2 * 7 / 8 * KERNEL.nbytes


@pytest.mark.parametrize("grid", [(2, 4), (4, 2)])
@pytest.mark.parametrize("mode", ["edge", "wrap"])
def test_where_rows_and_columns_are_split(mode, grid):
    """Corners are of both borders: the convolution stays as it is."""
    tiles = np.arange(8).reshape(1, *grid, 1)

    def loss(x):
        q = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), mode=mode)
        y = lax.conv_general_dilated(q, KERNEL, (1, 1), "VALID", dimension_numbers=NUMBERS)
        return jnp.sum(jnp.tanh(y))

    low = check(jax.grad(loss), X, inputs=[tiles], rtol=1e-4, atol=1e-4)
    assert sent(low) < 3.5 * X.nbytes / 8, low.collectives


@given(
    st.sampled_from(["edge", "reflect", "wrap"]),
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
    st.integers(1, 5),
    st.integers(1, 2),
    st.integers(1, 2),
    st.sampled_from([1, 2]),
    st.sampled_from([16, 21]),
)
def test_any_padding_of_any_convolution(mode, around, taps, stride, dilation, groups, rows):
    x, kernel = random_array((1, rows, 3, 2)), random_array((taps, 1, 2 // groups, 2))

    def loss(x, kernel):
        q = jnp.pad(x, ((0, 0), around, (0, 0), (0, 0)), mode=mode)
        y = lax.conv_general_dilated(
            q, kernel, (stride, 1), "VALID", (1, 1), (dilation, 1), NUMBERS, groups
        )
        return jnp.sum(jnp.sin(y))

    check(jax.grad(loss, (0, 1)), x, kernel, inputs=[even_split(4, 1, 8)], rtol=1e-4, atol=1e-4)


def test_single_rows_that_are_read_apart():
    """Convolutions of a row each would have no tiles."""

    def fn(x):
        y = lax.conv_general_dilated(x, KERNEL, (1, 1), "SAME", dimension_numbers=NUMBERS)
        return y[:, 1:-1] * 2, y[:, :1], y[:, -1:]

    low = check(fn, X, inputs=[even_split(4, 1, 8)], rtol=1e-4, atol=1e-4)
    assert sent(low) < 12 * X[:, :1].nbytes, low.collectives


def test_what_somebody_reads_whole_stays(tmp_path):
    def fn(x):
        y = lax.conv_general_dilated(x, KERNEL, (1, 1), "SAME", dimension_numbers=NUMBERS)
        return y[:, 1:-1], y.sum()

    low = check(fn, X, inputs=[even_split(4, 1, 8)], rtol=1e-4, atol=1e-3)
    (text,) = (p.read_text() for p in low.dump(tmp_path) if "row_spaces" in p.name)
    assert "# not applied: no rows would stay in their tiles" in text


@given(
    st.integers(1, 3),
    st.integers(1, 2),
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
    st.sampled_from([16, 21]),
)
def test_any_window_of_any_convolution(stride, dilation, padding, cut, rows):
    x, kernel = random_array((1, rows, 6, 2)), random_array((3, 1, 2, 2))

    def fn(x):
        def forwards(x):
            q = jnp.pad(x, ((0, 0), padding, (0, 0), (0, 0)))
            y = lax.conv_general_dilated(
                q, kernel, (stride, 1), "VALID", (1, 1), (dilation, 1), NUMBERS
            )
            return y[:, cut[0] : y.shape[1] - cut[1]]

        return forwards(x), jax.grad(lambda x: (forwards(x) ** 2).sum())(x)

    check(fn, x, inputs=[even_split(4, 1, 8)], rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------- pools


def means(q):
    return lax.reduce_window(q, 0.0, lax.add, (3, 3), (1, 1), "VALID") / 9


@pytest.mark.parametrize(
    ("mode", "rows"), [("wrap", 6), ("constant", 4), ("edge", 4), ("reflect", 4)]
)
def test_gradients_of_means_send_border_rows(mode, rows):
    """Two rows of the tensor, and two of the gradient; around a circle, two that go around."""
    x = random_array((64, 16))

    def loss(x):
        return jnp.sum(jnp.tanh(means(jnp.pad(x, 1, mode=mode))))

    low = check(jax.grad(loss), x, inputs=[even_split(2, 0, 8)], rtol=1e-4, atol=1e-5)
    assert sent(low) <= rows * x[:1].nbytes, low.collectives


@given(
    st.sampled_from([("sum", 0.0, lax.add), ("max", -np.inf, lax.max), ("min", np.inf, lax.min)]),
    st.sampled_from(["identity", "edge", "wrap"]),
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
    st.tuples(st.integers(1, 4), st.integers(1, 2), st.integers(1, 2), st.integers(1, 2)),
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
    st.sampled_from([16, 21]),
)
def test_any_window_of_any_pool(kind, mode, around, how, cut, rows):
    """And their borders, in the gradients of sums; pads with the identity are a pool's own."""
    (name, start, operator), (taps, stride, base, gap) = kind, how
    x = random_array((rows, 3))
    filled = {"constant_values": start} if mode == "identity" else {"mode": mode}

    def pooled(x):
        q = jnp.pad(x, (around, (0, 0)), **filled)
        y = lax.reduce_window(
            q, start, operator, (taps, 1), (stride, 1), "VALID", (base, 1), (gap, 1)
        )
        return y[cut[0] : y.shape[0] - cut[1]]

    fn = jax.grad(lambda x: jnp.sum(jnp.sin(pooled(x)))) if name == "sum" else pooled
    check(fn, x, inputs=[even_split(2, 0, 8)], rtol=1e-4, atol=1e-4)


def test_borders_of_maxima():
    """Tiles compute them of the rows under one window, and of nothing that is larger."""

    def fn(x):
        y = lax.reduce_window(x, -jnp.inf, lax.max, (3, 1), (1, 1), ((2, 2), (0, 0)))
        return (x + y[1:-1]).at[:1].add(y[:1]).at[-1:].add(y[-1:])

    x = -1 - abs(random_array((64, 3)))
    low = check(fn, x, inputs=[even_split(2, 0, 8)])
    assert sent(low) == 2 * x[:1].nbytes, low.collectives


@pytest.mark.parametrize("mode", ["edge", "reflect"])
def test_the_gradient_of_a_convolution_that_has_a_batch_of_one(mode):
    """Windows of it lose two dims, and are windows of the field all the same."""
    kernel = random_array((1, 1, 3, 3), seed=1)

    def fn(u):
        q = jnp.pad(u, 1, mode=mode)[None, None]
        return lax.conv_general_dilated(q, kernel, (1, 1), "VALID")[0, 0]

    def gradient(u):
        return jax.grad(lambda u: jnp.sum(jnp.sin(fn(u))))(u)

    split = [even_split(2, 0, 8)]
    low = check(gradient, random_array((64, 12)), inputs=split, outputs=split, rtol=1e-4, atol=1e-4)
    assert sent(low) <= 4 * 12 * 4, low.collectives
