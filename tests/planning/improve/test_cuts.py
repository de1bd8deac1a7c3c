"""Cuts of values, and of single equations, beside the values that are not cut."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from jax.extend.core import Literal

from gshard.graph.evaluate import bind
from gshard.planning.improve.cuts import Cut, cuts_of, on_pieces
from tests.oracle import random_array


@given(st.data())
def test_pieces_of_a_value(data):
    blocks, count, rows = (data.draw(st.integers(1, 4)) for _ in range(3))
    dim = data.draw(st.integers(0, 2))
    shape = [2, 3, 2]
    shape[dim] = blocks * count * rows
    x, cut = jnp.asarray(random_array(shape)), Cut(dim, blocks)
    pieces = [cut.piece(x, i, count) for i in range(count)]
    assert all(p.shape == cut.shape(x.shape, count) for p in pieces)
    np.testing.assert_array_equal(cut.joined(pieces), x)
    # Each piece has an equal part of every block.
    inside = np.moveaxis(np.asarray(x), dim, 0).reshape(blocks, count, rows, -1)
    first = np.moveaxis(np.asarray(pieces[0]), dim, 0).reshape(blocks, rows, -1)
    np.testing.assert_array_equal(first, inside[:, 0])


OPERATORS = {
    "product": (lambda a, b: jnp.einsum("eij,ejk->eki", a, b), [(4, 4, 8), (4, 8, 4)]),
    "transposed": (lambda a: jnp.transpose(a, (2, 0, 1)), [(4, 8, 2)]),
    "merged": (lambda a: jnp.reshape(a, (4, 16)), [(4, 8, 2)]),
    "parted": (lambda a: jnp.reshape(a, (2, 4, 4, 2)), [(8, 8)]),
    "sum": (lambda a: jnp.sum(a, 1), [(4, 8, 2)]),
    "grown": (lambda a: jax.lax.broadcast_in_dim(a, (8, 4, 4), (0, 2)), [(8, 4)]),
    "chosen": (lambda a, b: jax.lax.select(a > 0, a, b), [(4, 8), (4, 8)]),
}


@given(st.sampled_from(sorted(OPERATORS)), st.data())
def test_an_operator_in_pieces(name, data):
    fn, shapes = OPERATORS[name]
    values = [jnp.asarray(random_array(s, seed=i)) for i, s in enumerate(shapes)]
    jaxpr = jax.make_jaxpr(fn)(*values).jaxpr
    env = dict(zip(jaxpr.invars, values, strict=True))
    for eqn in jaxpr.eqns:
        inputs = [a.val if isinstance(a, Literal) else env[a] for a in eqn.invars]
        (whole,) = bind(eqn, inputs)
        env[eqn.outvars[0]] = whole
        dim = data.draw(st.integers(0, whole.ndim - 1))
        blocks, count = data.draw(st.sampled_from([1, 2])), data.draw(st.sampled_from([2, 4]))
        cuts = cuts_of(eqn, {eqn.outvars[0]: Cut(dim, blocks)}, count)
        if cuts is None:
            continue
        pieces = []
        for i in range(count):
            pairs = zip(inputs, cuts.operands, strict=True)
            parts = [x if c is None else c.piece(x, i, count) for x, c in pairs]
            pieces += on_pieces(eqn, cuts, parts, count)
        np.testing.assert_allclose(cuts.results[0].joined(pieces), whole, rtol=1e-5)


def test_a_summed_dim_is_not_cut():
    jaxpr = jax.make_jaxpr(jnp.matmul)(jnp.ones((8, 8)), jnp.ones((8, 8))).jaxpr
    (eqn,) = jaxpr.eqns
    a, b = eqn.invars
    assert cuts_of(eqn, {a: Cut(1)}, 2) is None
    assert cuts_of(eqn, {a: Cut(0)}, 2).operands == (Cut(0), None)
    assert cuts_of(eqn, {b: Cut(1)}, 2).results == (Cut(1),)
    assert cuts_of(eqn, {a: Cut(0)}, 3) is None  # 8 rows are not 3 equal pieces
    assert cuts_of(eqn, {a: Cut(0), b: Cut(1)}, 2) is None  # pieces of rows times those of columns
