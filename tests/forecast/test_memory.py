"""Memory by liveness: small programs by hand, and XLA's own figures for training steps."""

import inspect

import jax
import jax.numpy as jnp
import pytest

import gshard
from benchmarks.forecast_memory import PROGRAMS, compare
from gshard.forecast.compilers import COMPILERS
from gshard.forecast.memory import memory_of
from gshard.forecast.program import body_of

KB = 1024


def memory(fn, *shapes, donated=(), style="gpu"):
    arguments = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    jaxpr = gshard.jit(fn, devices=1).lower(*arguments).jaxpr
    return memory_of(body_of(jaxpr, style), COMPILERS[style], donated)


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
    """What enters each of 8 layers, in place of the arguments of both sines.

    A step of the backward loop cuts its layer's input and weights out, and has two values more.
    """
    shapes, value = ((64, 32), (8, 32, 32)), 64 * 32 * 4
    none, layer = (memory(grad_of_stack(r), *shapes).temporary for r in (False, True))
    assert 16 * value <= none <= 20 * value
    assert 8 * value <= layer <= 13 * value


def test_memory_grows_with_the_length_of_a_loop_that_keeps():
    short, long = (memory(grad_of_stack(False), (64, 32), (n, 32, 32)).temporary for n in (4, 16))
    assert 3 * short < long < 4.5 * short


def test_cpus_store_the_broadcasts_that_reductions_read():
    def fn(x, w):
        return jnp.sum(x * w, axis=1)

    shapes = (64, 128), (1, 128)
    assert memory(fn, *shapes).temporary == 0
    assert memory(fn, *shapes, style="cpu").temporary == 64 * 128 * 4


def test_cpus_keep_a_donated_argument_aside_if_somebody_may_read_it_late():
    def fn(x, w):
        return (x @ w) @ w, w + jnp.sum(x)

    late, early = (memory(fn, (16, 16), (16, 16), donated=d, style="cpu") for d in ((1,), ()))
    assert late.temporary - early.temporary == KB - 4  # the sum lies in the argument's place
    assert (late.donated, early.donated) == (KB, 0)


def test_cpus_transpose_what_a_product_over_two_dims_reads():
    def fn(x, y):
        return jnp.einsum("btm,bth->mh", x, y)

    shapes = (4, 8, 16), (4, 8, 16)
    assert memory(fn, *shapes).temporary <= KB  # the result before it is transposed
    assert memory(fn, *shapes, style="cpu").temporary >= 4 * 8 * 16 * 4


def test_a_sum_of_rows_is_kept_and_not_the_rows():
    """The sum is read by two operators: the rows need not live until the second."""

    def fn(x, w, v):
        rows = jnp.cumsum(x @ w, axis=1)
        total = jnp.sum(rows, axis=1, keepdims=True)
        return ((x * total) @ v) @ v.T * total

    found = memory(fn, (16, 16), (16, 1024), (16, 2048))
    small = 2 * KB + 64  # the argument of a product, and the sums
    assert 128 * KB <= found.temporary <= 128 * KB + small  # [16, 2048]; the rows are 64 KB


def test_gpus_copy_between_loops_that_do_not_agree_on_a_layout():
    """Scores of 32 layers, stacked as the product writes them or as the user would have them."""

    def loss(scores, back, x, ws):
        def layer(x, w):
            made = jnp.tanh(jnp.einsum(scores, x @ w, x))
            return x + jnp.einsum(back, made, x), None

        return jnp.sum(jax.lax.scan(layer, x, ws)[0])

    layers, i, t = 32, 4, 16
    written, turned = (
        memory(
            lambda x, ws, e=e, b=b: jax.grad(loss, 2)(e, b, x, ws), (t, i, 8), (layers, 8, 8)
        ).temporary
        for e, b in (("tid,sid->its", "its,sid->tid"), ("tid,sid->tis", "tis,sid->tid"))
    )
    assert turned - written > 0.5 * layers * i * t * t * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_within_a_tenth_of_what_xla_plans(name):
    ours, theirs = compare(name)
    assert ours == pytest.approx(theirs, rel=0.1)
