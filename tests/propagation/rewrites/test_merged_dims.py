"""Products, reductions and operators by element on merged dims run on the dims before."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.flatten_util import ravel_pytree

import gshard
from gshard.propagation.rewrites.merged_dims import _merged
from tests.oracle import (
    DEVICE_COUNTS,
    annotated,
    assignments,
    check,
    even_split,
    random_array,
    sent,
)

X, Y = random_array((64, 40)), random_array((64, 40), seed=1)
COLUMNS = [even_split(2, 1, 8)] * 2


@pytest.mark.parametrize(
    ("before", "after", "parts"),
    [
        ((64, 40), (2560,), ((64, 40),)),
        ((4, 30, 12, 16), (4, 360, 4, 4), ((4,), (30, 12), (4,), (4,))),
        ((6, 4), (8, 3), None),  # no common parts
        ((1, 5, 1), (5, 1), ((5,), (1,))),
        ((4, 6), (2, 12), ((2,), (2, 6))),
        ((0, 3), (0,), None),
    ],
)
def test_parts_of_dims(before, after, parts):
    assert _merged(before, after) == parts


def centered(groups):
    return groups - groups.mean(1, keepdims=True)


PROGRAMS = {  # what is sent: sums of one number for each of some
    "vdot": (lambda x, y: jnp.vdot(x, y), 7),
    "norms": (lambda x, y: (jnp.linalg.norm(x.ravel()), jnp.abs(y).ravel().max()), 14),
    "both forms of one tensor": (lambda x, y: (x.reshape(-1) * y.reshape(-1)).sum() + x.sum(), 7),
    "gradient": (lambda x, y: jax.grad(lambda x: jnp.vdot(jnp.sin(x), y) ** 2)(x), 7),
    "softmax": (lambda x, y: jax.nn.softmax(x.reshape(-1)).reshape(x.shape), 14),
    "products": (lambda x, y: x.reshape(1, -1) @ y.reshape(-1, 1), 7),
    "transposes": (lambda x, y: (x.reshape(8, -1) @ y.reshape(8, -1).T), 7 * 64),
    "Fortran's order": (lambda x, y: x.ravel(order="F") @ y.ravel(order="F"), 7),
    "both orders": (lambda x, y: jnp.sum(x.reshape(-1, order="F") * jnp.arange(x.size)), 7),
    "groups": (lambda x, y: centered(x.reshape(8, -1)).reshape(x.shape), 2 * 7 * 4),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_but_sums_is_sent(name):
    fn, expected = PROGRAMS[name]
    low = check(fn, X, Y, inputs=COLUMNS, rtol=1e-4, atol=1e-4)
    assert sent(low) == expected


def test_a_field_with_padding():
    """61 rows in tiles of 8: flat tiles would have 40 * 8 elements, all but the first elsewhere."""
    x = random_array((61, 40))
    low = check(lambda x: jnp.vdot(jnp.cos(x), x), x, inputs=[even_split(2, 0, 8)])
    assert sent(low) == 7


def test_a_dense_layer_on_images_that_are_split_by_columns():
    images, w = random_array((8, 16, 24, 3)), random_array((16 * 24 * 3, 10))
    fn = lambda images, w: jax.nn.relu(images).reshape(8, -1) @ w  # noqa: E731
    low = check(fn, images, w, inputs=[even_split(4, 2, 8)], rtol=1e-4, atol=1e-4)
    assert sent(low) == 2 * 7 / 8 * 8 * 10 * 4


def test_conjugate_gradients_on_a_field_of_columns():
    def solve(b):
        def stencil(u):
            q = jnp.pad(u, 1)
            return 4 * u - q[2:, 1:-1] - q[:-2, 1:-1] - q[1:-1, 2:] - q[1:-1, :-2]

        return jax.scipy.sparse.linalg.cg(stencil, b, maxiter=3)[0]

    low = check(solve, X, inputs=COLUMNS[:1], rtol=1e-4, atol=1e-4)
    assert sent(low) <= 4 * 2 * 64 * 4 + 10 * 7, low.collectives  # borders, and dot products


def test_what_somebody_needs_merged_is_merged_once(tmp_path):
    """The flat tensor is a result: computing on the dims before would save nothing."""

    def fn(x):
        flat = x.ravel()
        return flat, (flat * flat).sum()

    check(fn, X, inputs=COLUMNS[:1], rtol=1e-4)
    struct = jax.ShapeDtypeStruct(X.shape, X.dtype)
    low = gshard.jit(annotated(fn, COLUMNS[:1]), devices=8).lower(struct)
    (text,) = (p.read_text() for p in low.dump(tmp_path) if "undo_merges" in p.name)
    assert "# not applied: no reshape moves rows for a sum" in text


def test_flat_parameters_and_their_norm():
    """A scalar of a row map is read by what is computed in its place (`row_spaces`)."""
    p = {"a": X, "b": random_array((130, 8))}
    g = {"a": Y, "b": random_array((130, 8), seed=1)}

    def fn(p, g):
        p = {"a": gshard.split(p["a"], 1, 8), "b": gshard.split(p["b"], 0, 8)}
        flat, restored = ravel_pytree(p)
        h, _ = ravel_pytree(g)
        return restored(flat - 0.1 * h / jnp.linalg.norm(h))

    check(fn, p, g)


@st.composite
def merges(draw):
    """A shape, a shape with some of its neighbouring dims merged, and a split of the first."""
    before = draw(st.lists(st.sampled_from([1, 2, 3, 4, 5, 8]), min_size=2, max_size=4))
    ends = sorted(draw(st.sets(st.integers(1, len(before) - 1), max_size=2)) | {len(before)})
    after = [math.prod(before[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
    devices = draw(st.sampled_from(DEVICE_COUNTS))
    return before, after, devices, draw(assignments(len(before), devices))


@given(merges(), st.integers(0, 7))
def test_any_merge_and_what_follows(case, kind):
    before, after, devices, split = case
    x = random_array(before)
    other = np.asarray(random_array([math.prod(before)]), np.float32).reshape(after)

    def fn(x):
        m = jnp.sin(x).reshape(after) * other
        last = len(after) - 1
        if kind == 0:
            return m.sum(last), m.max(0)
        if kind == 1:
            return lax.dot_general(m, jnp.cos(m), (((last,), (last,)), ((), ())))
        if kind == 2:
            return (m - m.mean(0, keepdims=True)).reshape(before)
        if kind == 3:
            return jax.grad(lambda m: (jnp.tanh(m.T) * other.T).sum())(m).reshape(before)
        if kind == 4:
            return m.transpose(), m.reshape(-1) @ m.reshape(-1)
        if kind == 5:
            return m.ravel(order="F") @ jnp.arange(m.size, dtype=m.dtype)
        if kind == 6:
            return jnp.einsum("i...,i...->i", m, jnp.sin(x).reshape(after))
        return jnp.where(m > 0, m, m.min(last, keepdims=True)).prod(0)

    check(fn, x, devices=devices, inputs=[split], rtol=1e-4, atol=1e-4)
