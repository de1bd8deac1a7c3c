"""Reproducible loops: what every turn adds is reduced once, after the loop."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import gshard
from tests.oracle import annotated, even_split, random_array, sent
from tests.reproducible.test_order import bits, leaves, product, tree

TURNS = 3


def terms(x: np.ndarray, y: np.ndarray) -> list[list[np.ndarray]]:
    """The leaves of x[t].T @ y[t], for each turn t."""
    return [
        [
            product(np.ascontiguousarray(u.T), v)
            for u, v in zip(leaves(a, 0, 24), leaves(b, 0, 24), strict=True)
        ]
        for a, b in zip(x, y, strict=True)
    ]


def summed(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The tree over the leaves of all turns, which are added in the order of turns."""
    zero = np.zeros((x.shape[2], y.shape[2]), np.float32)
    carried = [zero] * len(leaves(x[0], 0, 24))
    for turn in terms(x, y):
        carried = [a + b for a, b in zip(carried, turn, strict=True)]
    return tree(carried)


@pytest.mark.parametrize("how", ["zeros", "start", "transposed", "annotated", "reverse"])
def test_the_leaves_of_a_sum_are_carried(how):
    x, y = random_array((TURNS, 192, 8)), random_array((TURNS, 192, 16), seed=1)
    start = random_array((8, 16), seed=2)

    def fn(x, y, start):
        def turn(total, rows):
            a, b = rows
            if how == "transposed":
                return (b.T @ a).T + total, None
            total = total + a.T @ b
            return gshard.split(total, 0, 2) if how == "annotated" else total, None

        begin = start if how == "start" else jnp.zeros((8, 16))
        return lax.scan(turn, begin, (x, y), reverse=how == "reverse")[0]

    order = slice(None, None, -1 if how == "reverse" else 1)
    wanted = summed(x[order], y[order])
    wanted = start + wanted if how == "start" else wanted
    where = [even_split(3, 1, 8)] * 2
    lowered = gshard.jit(annotated(fn, where), devices=8, reproducible=True).lower(x, y, start)
    size = 8 * 16 * 4
    assert sent(lowered) <= 2 * size * 7 // 8
    assert {c.count for c in lowered.collectives} == {1}
    devices = 8 if how == "annotated" else 3
    got = bits(fn, x, y, start, devices=devices, inputs=[even_split(3, 1, devices)] * 2)
    np.testing.assert_array_equal(np.asarray(got), wanted)


def test_loops_in_loops_carry_leaves_to_the_end():
    x, y = random_array((2, TURNS, 192, 8)), random_array((2, TURNS, 192, 16), seed=1)

    def fn(x, y):
        def inner(total, rows):
            return total + rows[0].T @ rows[1], None

        def outer(total, rows):
            return total + lax.scan(inner, jnp.zeros((8, 16)), rows)[0], None

        return lax.scan(outer, jnp.zeros((8, 16)), (x, y))[0]

    where = [even_split(4, 2, 8)] * 2
    lowered = gshard.jit(annotated(fn, where), devices=8, reproducible=True).lower(x, y)
    assert sent(lowered) == 2 * 8 * 16 * 4 * 7 // 8


def test_the_gradient_of_a_shared_weight_is_reduced_once():
    """The transposed loop adds the gradients of all turns, those of a lookup among them."""
    w, x = random_array((16, 16)), random_array((192, 16), seed=1)
    places = np.arange(192, dtype=np.int32) % 16

    def loss(w, x):
        def turn(x, _):
            return jnp.tanh(x @ w + w[places]), None

        return jnp.mean(lax.scan(turn, x, None, TURNS)[0] ** 2)

    step = jax.grad(loss)
    where = [None, even_split(2, 0, 8)]
    on_8 = functools.partial(gshard.jit, annotated(step, where), devices=8, reproducible=True)
    assert {c.count for c in on_8().lower(w, x).collectives} == {1}
    alone = gshard.jit(step, devices=jax.devices()[:1], reproducible=True)(w, x)
    for devices in (3, 8):
        got = bits(step, w, x, devices=devices, inputs=[None, even_split(2, 0, devices)])
        np.testing.assert_array_equal(np.asarray(got), np.asarray(alone))


def test_a_carry_that_a_turn_looks_at_is_reduced_in_every_turn():
    x, y = random_array((TURNS, 192, 8)), random_array((TURNS, 192, 16), seed=1)

    def fn(x, y):
        def turn(total, rows):
            return total + rows[0].T @ (rows[1] + total[0]), None

        return lax.scan(turn, jnp.zeros((8, 16)), (x, y))[0]

    where = [even_split(3, 1, 8)] * 2
    lowered = gshard.jit(annotated(fn, where), devices=8, reproducible=True).lower(x, y)
    assert TURNS in {c.count for c in lowered.collectives}
    alone = bits(fn, x, y, devices=1)
    np.testing.assert_array_equal(
        np.asarray(bits(fn, x, y, devices=8, inputs=where)), np.asarray(alone)
    )
