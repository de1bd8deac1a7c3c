"""Terms of one sum are added on each device first: products, other values, scatters, stacks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gshard
from tests.oracle import assignments, check, even_split, kinds, random_array, sent

ROWS, COLUMNS = even_split(2, 0, 8), even_split(2, 1, 8)


def lowered(fn, *args, inputs=(), outputs=(), tolerance=1e-4):
    return check(fn, *args, inputs=inputs, outputs=outputs, rtol=tolerance, atol=tolerance)


ORDERS = {
    "the value first": lambda h, a, b: h + a + b,
    "the value between": lambda h, a, b: a + h + b,
    "the value last": lambda h, a, b: a + b + h,
    "subtracted from": lambda h, a, b: h - a - b,
    "with a factor": lambda h, a, b: 0.5 * (h + a) + b,
    "a number too": lambda h, a, b: h + a + 0.5 + b,
    "a bias too": lambda h, a, b: h + a + jnp.arange(8.0) + b,
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("split", [None, ROWS, np.arange(4).reshape(2, 2)])
def test_products_and_a_value_are_summed_once(order, split):
    """However the value is split, and wherever it stands among the products."""
    shapes = [(16, 8), (16, 32), (32, 8), (16, 24), (24, 8)]
    args = [random_array(s, seed=i) for i, s in enumerate(shapes)]
    low = lowered(
        lambda h, x, a, y, b: gshard.replicate(jnp.tanh(ORDERS[order](h, x @ a, y @ b))),
        *args,
        inputs=[split, COLUMNS, ROWS, COLUMNS, ROWS],
    )
    found = kinds(low)
    assert found.get("all_reduce", 0) + found.get("reduce_scatter", 0) == 1
    if split is None:
        assert sent(low) == 2 * 16 * 8 * 4 * 7 // 8


def test_a_sum_that_is_split_is_scattered_with_the_value_in_it():
    """Sequence parallelism of a parallel block: one ReduceScatter, and the residual stays split."""
    shapes = [(16, 8), (16, 32), (32, 8), (16, 24), (24, 8)]
    args = [random_array(s, seed=i) for i, s in enumerate(shapes)]
    low = lowered(
        lambda h, x, a, y, b: gshard.split(h + x @ a + y @ b, 0, 8),
        *args,
        inputs=[ROWS, COLUMNS, ROWS, COLUMNS, ROWS],
    )
    assert kinds(low) == {"reduce_scatter": 1}
    assert sent(low) == 16 * 8 * 4 * 7 // 8


@st.composite
def sums(draw):
    """Products, values and constants, added in any order; the sum wanted in any form."""
    a, k, b = (draw(st.sampled_from([1, 4, 8, 13])) for _ in range(3))
    terms = draw(st.lists(st.sampled_from("pvc-"), min_size=2, max_size=5))

    def fn(x, w, h):
        total = x @ w
        for number, term in enumerate(terms):
            if term == "c":
                total = total + jnp.ones((a, b)) * number
            elif term == "v":
                total = h * (number + 1.0) + total
            else:
                product = (x + number) @ w
                total = total - product if term == "-" else total + product
        return total

    shapes = [(a, k), (k, b), (a, b)]
    return fn, shapes, [draw(assignments(2, 8)) for _ in shapes], [draw(assignments(2, 8))]


def any_sum(program):
    fn, shapes, inputs, outputs = program
    args = [random_array(s, seed=i) for i, s in enumerate(shapes)]
    lowered(fn, *args, inputs=inputs, outputs=outputs, tolerance=1e-3)


@settings(max_examples=4)
@given(sums())
def test_random_sums(program):
    any_sum(program)


@pytest.mark.slow
@settings(max_examples=150)
@given(sums())
def test_many_random_sums(program):
    any_sum(program)


# ---------------------------------------------------------------- scatters


def both_ways(nodes, values, s, r):
    return jnp.zeros_like(nodes).at[r].add(values).at[s].add(jnp.sin(values))


def added(nodes, values, s, r):
    size = len(nodes)
    return jax.ops.segment_sum(values, r, size) + jax.ops.segment_sum(jnp.sin(values), s, size)


def onto_the_nodes(nodes, values, s, r):
    return nodes.at[r].add(values).at[s].add(-jnp.sin(values))


@pytest.mark.parametrize("way", [both_ways, added, onto_the_nodes])
@pytest.mark.parametrize("edges", [32, 27])
def test_scatters_into_one_sum_are_reduced_once(way, edges):
    ids = np.random.default_rng(0).integers(0, 7, (2, edges))
    args = random_array((7, 5)), random_array((edges, 5)), *ids
    split = even_split(1, 0, 8)
    low = lowered(way, *args, inputs=[None, ROWS, split, split])
    assert kinds(low) == {"all_reduce": 1}
    assert sent(low) == 2 * 7 * 5 * 4 * 7 // 8


def test_a_scatter_onto_a_product_that_is_unreduced():
    ids = np.random.default_rng(0).integers(0, 16, 32)
    args = random_array((16, 32)), random_array((32, 8)), random_array((32, 8)), ids
    low = lowered(
        lambda a, b, values, ids: (a @ b).at[ids].add(values),
        *args,
        inputs=[COLUMNS, ROWS, ROWS, even_split(1, 0, 8)],
    )
    assert kinds(low) == {"all_reduce": 1}


def test_updates_that_all_devices_have_are_added_to_the_sum():
    ids = np.random.default_rng(0).integers(0, 16, 32)
    args = random_array((16, 32)), random_array((32, 8)), random_array((32, 8)), ids
    low = lowered(lambda a, b, values, ids: (a @ b).at[ids].add(values), *args, inputs=[COLUMNS])
    assert kinds(low) == {"all_reduce": 1}


# ---------------------------------------------------------------- stacks


def in_a_scan(weights, x):
    return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0] ** 2)


def one_by_one(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


@pytest.mark.parametrize("layers", [8, 10])
@pytest.mark.parametrize("way", ["in a scan", "one by one", "rows of a stack"])
def test_gradients_that_are_split_by_layer_are_scattered(layers, way):
    def fn(weights, momentum, x):
        weights = list(weights) if way == "one by one" else weights
        loss = in_a_scan if way == "in a scan" else one_by_one
        grads = jax.grad(loss)(weights, gshard.split(x, 0, 8))
        grads = jnp.stack(grads) if way == "one by one" else grads
        return gshard.split(0.9 * gshard.split(momentum, 0, 8) + grads, 0, 8)

    stack = random_array((layers, 6, 6))
    low = lowered(fn, stack, stack + 1, random_array((256, 6)))
    assert kinds(low) == {"reduce_scatter": 1}
    assert sent(low) == -(-layers // 8) * 8 * 6 * 6 * 4 * 7 // 8


@pytest.mark.parametrize("join", [jnp.concatenate, jnp.stack, lambda xs: jnp.concatenate(xs[::-1])])
def test_what_is_put_together_is_scattered_at_once(join):
    def fn(xs, ws, other):
        return gshard.split(jnp.tanh(join([x @ w for x, w in zip(xs, ws, strict=True)])), 0, 8)

    xs, ws = ([random_array(s, seed=i) for i in range(8)] for s in ((8, 16), (16, 8)))
    low = lowered(fn, xs, ws, 0.0, inputs=[*[COLUMNS] * 8, *[ROWS] * 8])
    assert kinds(low) == {"reduce_scatter": 1}
    assert sent(low) == 8 * 8 * 8 * 4 * 7 // 8


def test_what_is_put_together_with_sums_is_not_summed():
    """The other tensor is large, and every device has it."""
    args = random_array((2, 32)), random_array((32, 8)), random_array((62, 8))
    low = lowered(
        lambda x, w, h: gshard.split(jnp.concatenate([x @ w, gshard.replicate(h)]), 0, 8),
        *args,
        inputs=[COLUMNS, ROWS],
    )
    assert sent(low) == 2 * 2 * 8 * 4 * 7 // 8


def test_sums_that_are_put_together_are_one_collective():
    xs, ws = ([random_array(s, seed=i) for i in range(3)] for s in ((2, 16), (16, 8)))

    def fn(xs, ws):
        return jnp.concatenate([x @ w for x, w in zip(xs, ws, strict=True)])

    low = lowered(fn, xs, ws, inputs=[*[COLUMNS] * 3, *[ROWS] * 3])
    assert [sent.kind for sent in low.plan.sends] == ["reduce"]
