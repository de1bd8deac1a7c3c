"""Memory by liveness: small programs by hand, and XLA's own figures for training steps."""

import inspect

import jax
import jax.numpy as jnp
import pytest

import gshard
from benchmarks.forecast_memory import FURTHER_OFF, PROGRAMS, compare
from gshard.forecast.memory import memory_of

KB = 1024


def memory(fn, *shapes, donated=(), style="gpu"):
    arguments = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    jaxpr = gshard.jit(fn, devices=1).lower(*arguments).jaxpr
    return memory_of(jaxpr, donated, style)


def test_pointwise_chains_need_no_memory_in_between():
    found = memory(lambda x: jnp.tanh(x * 2 + 1) - x, (256,))
    assert (found.arguments, found.results, found.temporary) == (KB, KB, 0)


def test_what_lies_between_products_is_live():
    def fn(x, w):
        return ((x @ w) @ w) @ w

    found = memory(fn, (16, 16), (16, 16))
    assert found.temporary == 2 * KB  # an operand and the result of the second product
    line = inspect.getsourcelines(fn)[1] + 1
    assert found.where.endswith(f"test_memory.py:{line}")


def test_a_donated_argument_gives_its_place_to_a_result():
    kept, given = (memory(lambda x: x + 1, (256,), donated=d) for d in ((), (0,)))
    assert (kept.peak, given.peak) == (2 * KB, KB)


def grad_of_stack(remat):
    def block(x, w):
        return jnp.sin(jnp.sin(x @ w) @ w)

    def loss(x, ws):
        step = jax.checkpoint(block) if remat else block
        return jnp.sum(jax.lax.scan(lambda x, w: (step(x, w), None), x, ws)[0])

    return jax.grad(loss)


def test_rematerialization_inside_a_loop_keeps_less():
    """What enters each of 8 layers, in place of the arguments of both sines."""
    shapes, value = ((64, 32), (8, 32, 32)), 64 * 32 * 4
    none, layer = (memory(grad_of_stack(r), *shapes).temporary for r in (False, True))
    assert 16 * value <= none <= 20 * value
    assert 8 * value <= layer <= 12 * value


def test_memory_grows_with_the_length_of_a_loop_that_keeps():
    short, long = (memory(grad_of_stack(False), (64, 32), (n, 32, 32)).temporary for n in (4, 16))
    assert 3 * short < long < 4.5 * short


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in PROGRAMS if n not in FURTHER_OFF])
def test_within_a_tenth_of_what_xla_plans(name):
    ours, theirs = compare(name)
    assert ours == pytest.approx(theirs, rel=0.1)
