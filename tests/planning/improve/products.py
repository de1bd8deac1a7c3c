"""A product under random splits, for the passes that hide its transfers."""

import jax
import jax.numpy as jnp
from hypothesis import strategies as st

import gshard
from tests.oracle import annotated, assert_same, assignments, random_array, run, sent

_SHAPES = (4, 8, 12), (4, 12, 8)


def _product(x, w):
    return jnp.tanh(jnp.einsum("eij,ejk->eki", jnp.cos(x), w))


@st.composite
def split_products(draw):
    """The product, annotated for 4 devices: its operands and its result are split at random."""
    inputs = [draw(assignments(3, 4)) for _ in _SHAPES]
    return annotated(_product, inputs, [draw(assignments(3, 4))])


def overlapped(marked):
    """The program with `overlap`, which has the values of the plain one and sends no more."""
    args = [random_array(s, seed=i) for i, s in enumerate(_SHAPES)]
    new, old = (gshard.jit(marked, overlap=o, devices=jax.devices()[:4]) for o in (True, False))
    assert_same(run(new, *args), jax.jit(_product)(*args), rtol=1e-4, atol=1e-4)
    lowered = new.lower(*args)
    assert sent(lowered) <= sent(old.lower(*args))
    return lowered
