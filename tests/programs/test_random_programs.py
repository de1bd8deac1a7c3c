"""Random programs under random annotations, NaN in the padding: always the unpartitioned result."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import gshard
from tests.oracle import DEVICE_COUNTS, assert_same, assignments, random_array, run

# Every operation takes the program's matrices and makes another one, of any shape.
OPERATIONS = {
    "tanh": lambda x, y: jnp.tanh(x),
    "add": lambda x, y: x + y if x.shape == y.shape else x + 1.0,
    "divide": lambda x, y: x / (1.0 + y * y) if x.shape == y.shape else x / 3.0,
    "where": lambda x, y: jnp.where(x > 0, x, 0.1 * x),
    "matmul": lambda x, y: jnp.tanh(x @ y) if x.shape[1] == y.shape[0] else jnp.tanh(x @ x.T),
    "transpose": lambda x, y: x.T,
    "softmax rows": lambda x, y: jax.nn.softmax(x, axis=0),
    "softmax columns": lambda x, y: jax.nn.softmax(x, axis=1),
    "norm": lambda x, y: x / jnp.sqrt(jnp.mean(x * x, axis=1, keepdims=True) + 1e-3),
    "broadcast sum": lambda x, y: jnp.broadcast_to(x.sum(0), (3, x.shape[1])),
    "maximum": lambda x, y: x - jnp.max(x, axis=0, keepdims=True),
    "product": lambda x, y: jnp.prod(jnp.tanh(x), axis=1, keepdims=True) + x,
    "reshape": lambda x, y: x.reshape(x.shape[1], x.shape[0]),
    "flatten": lambda x, y: x.reshape(1, -1)[:, :13],
    "shift": lambda x, y: jnp.roll(x, 1, axis=0),
    "slice": lambda x, y: x[:, ::2],
    "pad": lambda x, y: jnp.pad(x, ((1, 0), (0, 2)), constant_values=0.5),
    "reverse": lambda x, y: x[::-1],
    "concatenate": lambda x, y: jnp.concatenate([x, jnp.sin(x)], axis=1)[:, 1:14],
    "cumsum": lambda x, y: jnp.cumsum(x, axis=0) / 4,
    "associative scan": lambda x, y: lax.associative_scan(jnp.add, x, reverse=True) / 4,
    "sort": lambda x, y: jnp.sort(x, axis=0),
    "one-hot": lambda x, y: x * jax.nn.one_hot(jnp.argmax(x, axis=1), x.shape[1]),
    "take": lambda x, y: x[jnp.array([0, -1, 0])],
    "scan": lambda x, y: lax.scan(lambda c, r: (c * 0.5 + r, c), x[0], x)[1],
    "loop": lambda x, y: lax.fori_loop(0, 2, lambda i, c: jnp.sin(c) + x, x),
    "while": lambda x, y: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 0.9), (0, lax.stop_gradient(x))
    )[1] + x,
    "cond": lambda x, y: lax.cond(x.sum() > 0, lambda x: x * 2, lambda x: jnp.cos(x), x),
    "remat": lambda x, y: jax.checkpoint(lambda x: jnp.sin(jnp.tanh(x)))(x),
    "vmap": lambda x, y: jax.vmap(lambda row: row - row.mean())(x),
}  # fmt: skip


@st.composite
def random_programs(draw):
    devices = draw(st.sampled_from(DEVICE_COUNTS))
    shapes = [tuple(draw(st.integers(1, 9)) for _ in range(2)) for _ in range(2)]
    steps = draw(
        st.lists(
            st.tuples(
                st.sampled_from(sorted(OPERATIONS)),
                st.integers(0, 9),
                st.integers(0, 9),
                st.one_of(st.none(), assignments(2, devices)),
            ),
            min_size=1,
            max_size=5,
        )
    )
    return devices, shapes, [draw(assignments(2, devices)) for _ in shapes], steps


def program(steps, inputs, annotate):
    """Values made one after the other, each from two earlier ones, some of them annotated."""

    def fn(*args):
        values = [annotate(x, a) for x, a in zip(args, inputs, strict=True)]
        for name, i, j, assignment in steps:
            made = OPERATIONS[name](values[i % len(values)], values[j % len(values)])
            values.append(annotate(made, assignment))
        return values[-1], sum(jnp.sum(jnp.sin(v)) for v in values)

    return fn


def assert_equal_runs(case):
    devices, shapes, inputs, steps = case
    args = [random_array(s, seed=i) for i, s in enumerate(shapes)]

    def mark(x, assignment):
        return x if assignment is None else gshard.shard(x, assignment)

    def both(fn):
        return lambda *xs: (fn(*xs), jax.grad(lambda *a: fn(*a)[1], argnums=(0, 1))(*xs))

    wanted = jax.jit(both(program(steps, inputs, lambda x, a: x)))(*args)
    step = gshard.jit(both(program(steps, inputs, mark)), devices=jax.devices()[:devices])
    close = {"rtol": 2e-4, "atol": 2e-4}
    assert_same(run(step, *args, **close), wanted, **close)


@given(random_programs())
def test_random_programs(case):
    assert_equal_runs(case)


@pytest.mark.slow
@settings(max_examples=300, derandomize=False)
@given(random_programs())
def test_many_random_programs(case):
    assert_equal_runs(case)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_each_operation(name):
    """Alone, on 6 devices, uneven both ways, result and operands split differently."""
    mesh = np.arange(6).reshape(2, 3)
    steps = [(name, 0, 1, mesh.T)]
    assert_equal_runs((6, [(7, 8), (7, 8)], [mesh, np.arange(6)[::-1].reshape(6, 1)], steps))


def test_a_barrier_leaves_each_value_as_it_is():
    """What rematerialization keeps apart may be split over the same devices in different dims."""

    def fn(x, y):
        x, y = gshard.split(x, 0, 8), gshard.split(y, 1, 8)
        x, y = lax.optimization_barrier((x, y))
        return x * 2, y * 3

    args = random_array((16, 8)), random_array((8, 16), seed=1)
    step = gshard.jit(fn)
    assert step.lower(*args).collectives == []
    for got, wanted in zip(step(*args), (args[0] * 2, args[1] * 3), strict=True):
        np.testing.assert_array_equal(got, wanted)
