"""What no result needs is not sent; plan in, plan out."""

import jax
import jax.numpy as jnp

import gshard
from gshard.graph.regions import walk
from gshard.moving.nodes import node_of
from tests.oracle import check, even_split, kinds, random_array


def programs(fn, *arguments):
    return gshard.jit(fn).lower(*arguments)._program.history.programs


def sums(jaxpr):
    return [node_of(eqn).name for eqn in walk(jaxpr) if node_of(eqn)].count("reduce")


def one_of_two(x, w):
    """Two values are carried; the other one is not returned, and its sum is not needed."""

    def step(carry, x_BM):
        first, second = carry
        return (first + x_BM.T @ x_BM, 0.5 * second + x_BM.T @ w), None

    start = jnp.zeros((4, 4)), jnp.zeros((4, 2))
    return jax.lax.scan(step, start, x)[0][0]


def test_a_carried_value_that_is_not_needed():
    found = programs(
        lambda x, w: one_of_two(gshard.split(x, 1, 8), w), jnp.ones((3, 16, 4)), jnp.ones((16, 2))
    )
    assert sums(found["drop_unused"]) == 1


def test_values_and_collectives():
    x, w = random_array((3, 16, 4)), random_array((16, 2), seed=1)
    low = check(one_of_two, x, w, inputs=[even_split(3, 1, 8)], rtol=1e-4, atol=1e-4)
    assert kinds(low) == {"all_reduce": 1}
