"""Recursions of `lax.associative_scan` and their gradients, found in programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from gshard.capture.simplify.associative import scan
from gshard.capture.simplify.recursions import mark_recursions
from gshard.graph.evaluate import evaluate
from gshard.rules.base.primitives import edge_p


def combine(left, right):
    return left[0] * right[0], right[0] * left[1] + right[1]


def edges(fn, *args):
    """The marks where tensors leave recursions, and the program, which computes the same."""
    marked = mark_recursions(jax.make_jaxpr(fn)(*args))
    found = [eqn for eqn in marked.eqns if eqn.primitive is edge_p and eqn.params["recursion"]]
    computed = jax.jit(lambda *args: evaluate(marked, args))(*args)
    for got, wanted in zip(computed, jax.tree.leaves(jax.jit(fn)(*args)), strict=True):
        assert (got == wanted).all()
    return found


def inputs(rows):
    """Whole numbers, whose sums and products are exact in any order."""
    rng = np.random.default_rng(0)
    a, u = rng.choice([-1.0, 1.0], (rows, 3)), rng.integers(-9, 10, (rows, 3))
    return jnp.asarray(a, jnp.float32), jnp.asarray(u, jnp.float32)


def test_a_scan_and_its_gradient_are_found():
    """Of each element's four terms, the first is its gradient."""

    def loss(a, u):
        return (lax.associative_scan(combine, (a, u))[1] ** 2).sum()

    found = edges(jax.grad(loss, (0, 1)), *inputs(21))
    numbers = [eqn.params["number"] for eqn in found]
    assert [n for n in numbers if n >= 0] == [1, 1, 0]
    assert sum(n < 0 for n in numbers) == 3 + 2  # the first row of `a` is in no state
    assert {eqn.params["recursion"].cotangents for eqn in found} == {(), (1,)}


@pytest.mark.parametrize("reverse", [True, False])
def test_reversed_elements_are_those_of_a_reversed_scan(reverse):
    found = edges(lambda a, u: lax.associative_scan(combine, (a, u), reverse)[1], *inputs(13))
    assert [eqn.params["recursion"].reverse for eqn in found] == [reverse]


def test_what_is_read_inside_is_no_recursion():
    """A level has another reader, or the function differs from one level to the next."""

    def with_a_reader(a, u):
        return lax.associative_scan(combine, (a, u))[1], a[1::2]

    assert not edges(with_a_reader, *inputs(16))
    assert not edges(lambda x: lax.associative_scan(lambda a, b: a + len(b) * b, x), inputs(16)[0])


def test_the_recursion_is_that_of_jax():
    x = inputs(37)[1]
    ours = jax.make_jaxpr(lambda x: scan(lambda a, b: [a[0] + b[0]], [x], [0], True))(x)
    theirs = jax.make_jaxpr(lambda x: [lax.associative_scan(jnp.add, x, reverse=True)])(x)
    assert str(ours) == str(theirs)
