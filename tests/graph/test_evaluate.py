"""Programs that are interpreted: the parameters of their equations stay what they are."""

import jax
import numpy as np
import pytest
from jax import lax
from jax.extend.core import ClosedJaxpr

from gshard.graph.evaluate import bind, evaluate, rebuilt
from gshard.graph.regions import map_bodies, walk
from tests.rules.harness import cases, spread


def same_types(one, other):
    """Whether two parameters have the same types at every level; programs may differ."""
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same_types, one, other))
    return isinstance(one, ClosedJaxpr) or one is other


def solver(x):
    return lax.custom_linear_solve(lambda v: 2 * v, x, lambda _, b: b / 2)


def branches(x):
    return lax.cond(x[0] > 0, lambda x: x + 1, lambda x: x - 1, x)


def interpreted(program):
    """A function that rebuilds every parameter of every equation."""

    def interpret(eqn, values):
        return bind(eqn, values, **{k: rebuilt(v, interpret) for k, v in eqn.params.items()})

    return lambda *args: evaluate(program, args, interpret)


@pytest.mark.parametrize("fn", [solver, branches])
def test_named_tuples_of_programs(fn):
    x = np.arange(1.0, 5.0, dtype=np.float32)
    program = jax.make_jaxpr(fn)(x)
    np.testing.assert_allclose(interpreted(program)(x)[0], fn(x))
    for eqn in walk(program.jaxpr):
        again = map_bodies(eqn, lambda body: body.replace(jaxpr=body.jaxpr.replace()))
        assert all(same_types(v, again.params[k]) for k, v in eqn.params.items())


@pytest.mark.parametrize("name", spread(1))
def test_the_parameters_of_every_primitive_of_jax(name):
    case = cases()[name]
    args = case.dyn_args_maker(np.random.RandomState(0))
    program = jax.make_jaxpr(case.dyn_fun)(*args)
    for eqn in walk(program.jaxpr):
        for key, value in eqn.params.items():
            assert same_types(value, rebuilt(value, bind)), (eqn.primitive, key)
