"""Operators that run on rows in any order: those of `Rule.ordered` and resized dims are not."""

import jax
import numpy as np
import pytest
from jax import lax

from gshard.propagation.spread import rowwise
from gshard.rules import RULES
from gshard.rules.base.rule import factors_of
from tests.oracle import random_array

N = 4  # of every dim, so that a wrong one has the right size


def first_and_third(x):
    numbers = lax.GatherDimensionNumbers((1,), (0,), (0,))
    return lax.gather(x, np.array([[0], [2]]), numbers, (1, N), mode="clip")


PROGRAMS = {
    "add": (lambda x, y: lax.add(x, y), 2, {0, 1}),
    "transpose": (lambda x: lax.transpose(x, (1, 0)), 1, {0, 1}),
    "product": (lambda x, y: lax.dot(x, y), 2, {0}),
    "sum": (lambda x: lax.reduce_sum(x, (0,)), 1, {1}),
    "argmax": (lambda x: lax.argmax(x, 1, np.int32), 1, {0}),
    "cumsum": (lambda x: lax.cumsum(x, 0), 1, {1}),
    "cummax, reversed": (lambda x: lax.cummax(x, 1, reverse=True), 1, {0}),
    "sort": (lambda x: lax.sort(x, dimension=1), 1, {0}),
    "sort of two": (lambda x, y: lax.sort((x, y), dimension=0), 2, {1}),
    "top_k": (lambda x: lax.top_k(x, 2), 1, {0}),
    "reverse": (lambda x: lax.rev(x, (0,)), 1, {1}),
    "slice": (lambda x: lax.slice(x, (0, 1), (4, 3)), 1, {0}),
    "pad": (lambda x: lax.pad(x, 0.0, ((1, 0, 0), (0, 0, 0))), 1, {1}),
    "split": (lambda x: lax.split(x, (1, 3), axis=1), 1, {0}),
    "concatenate": (lambda x, y: lax.concatenate([x, y], 0), 2, {1}),
    "broadcast": (lambda x: lax.broadcast_in_dim(x, (N, N, N), (0, 2)), 1, {0, 1}),
    "reshape": (lambda x: lax.reshape(x, (N, 2, 2)), 1, {0}),
    "barrier": (lambda x, y: lax.optimization_barrier((x, y)), 2, {0, 1}),
    "gather, whose rule says nothing": (lambda x: first_and_third(x), 1, set()),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_rows_may_be_permuted(name):
    program, count, expected = PROGRAMS[name]
    operands = [random_array((N, N), seed=i) for i in range(count)]
    (eqn,) = jax.make_jaxpr(program)(*operands).jaxpr.eqns
    factors = factors_of(RULES[eqn.primitive], eqn)
    order, found = np.array([2, 0, 3, 1]), set()
    for factor in factors.sizes:
        if not rowwise(eqn, factor):
            continue
        both = zip(operands, factors.operands[:count], strict=True)
        ours = jax.tree.leaves(program(*[permuted(x, dims, factor, order) for x, dims in both]))
        results = jax.tree.leaves(program(*operands))
        for mine, y, dims in zip(ours, results, factors.results, strict=True):
            np.testing.assert_allclose(mine, permuted(y, dims, factor, order), rtol=1e-5, atol=1e-6)
        found.update(d for dims in factors.operands[:1] for d, n in enumerate(dims) if factor in n)
    assert found == expected


def permuted(x, dims, factor, order):
    """A tensor with the rows along a factor in another order."""
    return np.take(np.asarray(x), order, dims.index((factor,))) if (factor,) in dims else x
