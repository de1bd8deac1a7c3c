"""Unreduced values that loops carry are foreseen: every body is planned once."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import gshard
from gshard.planning.planner import Planner
from tests.oracle import check, even_split, kinds, random_array

ROWS = even_split(2, 0, 8)


def gradient(w, x):
    return jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)


def summed(fn, start, xs):
    """The sum of `fn` over a loop."""
    return lax.scan(lambda total, x: (total + fn(x), None), start, xs)[0]


def accumulated(w, x):
    """Gradients of batches, added up."""
    batches = x.reshape(3, 8, 4)
    return summed(lambda x: gradient(w, gshard.split(x, 0, 8)), jnp.zeros_like(w), batches)


def in_two_loops(w, x):
    """The same in a loop around another one."""
    return summed(lambda s: -accumulated(w * s, x), jnp.zeros_like(w), jnp.arange(1.0, 4))


def through_layers(w, x):
    """Gradients of layers in a loop, which leave a stack of sums; added up in another loop."""

    def loss(layers, x):
        return jnp.sum(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)[0])

    layers, batches = jnp.stack([w, w, w]), x.reshape(3, 8, 4)
    of_batch = lambda x: jax.grad(loss)(layers, gshard.split(x, 0, 8))  # noqa: E731
    return summed(of_batch, jnp.zeros_like(layers), batches)


def recursion(w, x):
    """The gradient of a linear recursion: sums that the backward loop is linear in."""

    def loss(w):
        def step(state, x):
            state = w @ state @ w.T + jnp.eye(4)
            return state, jnp.sum((x @ state) ** 2)

        return jnp.sum(lax.scan(step, jnp.eye(4), gshard.split(x.reshape(3, 8, 4), 1, 8))[1])

    return jax.grad(loss)(w)


@pytest.mark.parametrize("fn", [accumulated, in_two_loops, through_layers, recursion])
def test_a_body_is_planned_once_whatever_it_carries(fn, monkeypatch):
    """And what it carries is reduced once, after the loop."""
    planned, run = Counter(), Planner.run

    def counted(self, jaxpr, *args, **kwargs):
        planned[jaxpr] += 1
        return run(self, jaxpr, *args, **kwargs)

    monkeypatch.setattr(Planner, "run", counted)
    w, x = random_array((4, 4)) / 4, random_array((24, 4))
    lowered = gshard.jit(fn, devices=8).lower(w, x)
    assert len(planned) > 1
    assert set(planned.values()) == {1}
    assert set(kinds(lowered)) <= {"all_reduce", "collective_permute", "all_to_all"}
    sums = [c for c in lowered.collectives if c.kind == "all_reduce"]
    assert sum(c.count for c in sums) == 1


@pytest.mark.parametrize("fn", [in_two_loops, through_layers])
def test_values_that_are_carried_unreduced(fn):
    w, x = random_array((4, 4)) / 4, random_array((24, 4))
    check(fn, w, x, inputs=[None, ROWS], rtol=1e-4, atol=1e-4)
