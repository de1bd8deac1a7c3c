"""Partial sums wait: they are added, scaled and accumulated before the devices sum them, once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gshard
from tests.oracle import (
    annotated,
    assert_same,
    assignments,
    check,
    even_split,
    kinds,
    random_array,
    run,
    sent,
)

MESH = np.arange(8).reshape(2, 4)
ROWS, COLUMNS = even_split(2, 0, 8), even_split(2, 1, 8)


def lowered(fn, *args, inputs=(), tolerance=1e-4):
    return check(fn, *args, inputs=inputs, rtol=tolerance, atol=tolerance)


def test_two_products_are_summed_once():
    args = [random_array(s, seed=i) for i, s in enumerate([(5, 32), (32, 7), (5, 16), (16, 7)])]
    low = lowered(
        lambda a, b, c, d: jnp.tanh(a @ b + c @ d), *args, inputs=[COLUMNS, ROWS, COLUMNS, ROWS]
    )
    assert kinds(low) == {"all_reduce": 1}
    assert sent(low) == 2 * 5 * 7 * 4 * 7 // 8


def test_rows_of_an_unreduced_value_are_reversed_across_its_tiles():
    """Along a split dim it takes more than to reverse the rows of each tile."""
    args = [random_array(s, seed=i) for i, s in enumerate([(8, 16), (16, 8), (8, 16), (16, 8)])]
    inputs = [MESH, MESH[0][:, None], MESH, MESH[0][:, None]]
    lowered(lambda a, b, c, d: (a @ b)[::-1] + c @ d, *args, inputs=inputs)


def test_an_operator_that_was_in_place_before_knows_an_unreduced_operand():
    shapes = [(5, 7), (5, 7), (5, 7), (5, 32), (32, 7), (5, 16), (16, 7)]
    args = [random_array(s, seed=i) for i, s in enumerate(shapes)]

    def fn(a, b, c, w, x, y, z):
        return -a, -b, -c, jnp.tanh(-(w @ x) + -(y @ z))

    whole = [np.zeros((1, 1), int)] * 3
    low = lowered(fn, *args, inputs=[*whole, COLUMNS, ROWS, COLUMNS, ROWS])
    assert kinds(low) == {"all_reduce": 1}


@pytest.mark.parametrize(
    "then",
    [
        lambda x: -x,
        lambda x: x.T,
        lambda x: 3 * x,
        lambda x: x / 3,
        lambda x: x.reshape(10, 4),
        lambda x: x[None],
        lambda x: jnp.sum(x, 1),
        lambda x: x[1:4],
        lambda x: x[:, ::3],
        lambda x: jax.lax.dynamic_slice_in_dim(x, jnp.argmax(jnp.arange(3)), 2, axis=1),
        lambda x: jnp.where(jnp.arange(8) > 3, x, 0),
        lambda x: x @ jnp.tri(8, 3),
        lambda x: x[:, ::-1],
        lambda x: jax.scipy.linalg.solve_triangular(jnp.tri(5) + jnp.eye(5), x, lower=True),
        lambda x: x[jnp.argsort(jnp.cos(jnp.arange(3)))],
        lambda x: jnp.linalg.solve(jnp.tri(5) + 2 * jnp.eye(5), x),
    ],
)
def test_what_a_partial_sum_passes_through(then):
    args = [random_array(s, seed=i) for i, s in enumerate([(5, 32), (32, 8), (5, 16), (16, 8)])]
    low = lowered(
        lambda a, b, c, d: jnp.tanh(then(a @ b) + then(c @ d)),
        *args,
        inputs=[COLUMNS, ROWS, COLUMNS, ROWS],
    )
    assert kinds(low) == {"all_reduce": 1}


def test_a_sum_over_a_split_dim_of_a_partial_sum():
    """It may wait no longer: the devices that have other rows are not those that it waits for."""
    args = random_array((6, 16)), random_array((16, 5), seed=1)
    low = lowered(
        lambda a, b: jnp.tanh(jnp.sum(a @ b, 0)), *args, inputs=[MESH, np.arange(4).reshape(4, 1)]
    )
    assert kinds(low).keys() == {"all_reduce"}


@pytest.mark.parametrize(
    "last", [lambda x: x[:, -1], lambda x: jax.lax.dynamic_index_in_dim(x, 3, 1, keepdims=False)]
)
def test_of_a_slice_only_that_is_summed(last):
    """The logits of the last token, of weights split along the contracted dim."""
    args = random_array((4, 5, 32)), random_array((32, 7))
    low = lowered(
        lambda x, w: jax.nn.softmax(last(x @ w)), *args, inputs=[even_split(3, 2, 8), ROWS]
    )
    assert kinds(low) == {"all_reduce": 1}
    assert sent(low) == 2 * 4 * 7 * 4 * 7 // 8


def test_a_slice_along_a_split_dim_is_of_the_sum():
    def fn(a, b):
        return jnp.tanh((a @ b)[2:5])

    rows = np.arange(8).reshape(2, 4)
    low = lowered(fn, random_array((8, 16)), random_array((16, 7)), inputs=[rows, rows.T[:, :1]])
    assert "all_reduce" in kinds(low)


def test_a_sum_with_two_uses_is_taken_once():
    args = random_array((5, 32)), random_array((32, 7))
    low = lowered(lambda a, b: (jnp.tanh(2 * (y := a @ b)), y.T), *args, inputs=[COLUMNS, ROWS])
    assert kinds(low) == {"all_reduce": 1}


def test_what_is_scattered_is_scaled_after_it():
    """A lone sum gains nothing by waiting: a device has less to scale, and to transpose, after."""

    def fn(x, y, w):
        return gshard.split(w - 0.1 * jnp.tanh(3.0) * (x.T @ y).T, 0, 8)

    args = random_array((16, 8)), random_array((16, 24)), random_array((24, 8))
    low = lowered(fn, *args, inputs=[ROWS, ROWS, ROWS])
    assert kinds(low) == {"reduce_scatter": 1}
    scaled = [e.outvars[0].aval.shape for e in low.jaxpr.eqns if e.primitive.name == "mul"]
    assert (3, 8) in scaled
    assert (24, 8) not in scaled


def test_a_sum_is_not_widened_before_it_is_sent():
    args = [random_array(s, jnp.bfloat16) for s in [(5, 32), (32, 8)]]
    low = lowered(
        lambda a, b: jnp.tanh((a @ b).astype(jnp.float32)),
        *args,
        inputs=[COLUMNS, ROWS],
        tolerance=3e-2,
    )
    (reduce,) = low.collectives
    assert reduce.dtype == "bfloat16"


def accumulate(ws, x, dtype=jnp.float32):
    """The gradients of a loss over batches one after another, added up."""

    def loss(w, x):
        return jnp.mean(jnp.tanh(gshard.split(x, 0, 8) @ w) ** 2)

    def add(total, x):
        grads = jax.grad(loss)(ws, x)
        return total + grads.astype(dtype), None

    return jax.lax.scan(add, jnp.ones(ws.shape, dtype), x)[0]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_loop_accumulates_partial_sums_and_sums_after_it(dtype):
    """The carry starts with ones, which must count once; narrow gradients add up to wide ones."""
    args = random_array((7, 5), dtype), random_array((3, 16, 7), dtype)
    low = lowered(accumulate, *args, tolerance=1e-4 if dtype == jnp.float32 else 3e-2)
    (reduce,) = low.collectives
    assert (reduce.kind, reduce.count, reduce.dtype) == ("all_reduce", 1, "float32")


def test_what_the_body_needs_is_summed_in_the_loop():
    def fn(w, x):
        def add(total, x):
            total = total + gshard.split(x, 0, 8).T @ x
            return total, jnp.max(total)

        return jax.lax.scan(add, w, x)

    low = lowered(fn, random_array((7, 7)), random_array((3, 16, 7)))
    assert {(c.kind, c.count) for c in low.collectives} == {("all_reduce", 3)}


def test_scattered_within_and_summed_across():
    """HSDP: 8 parts of the batch, a gradient split in 4, with 2 copies."""

    def fn(x, y):
        return gshard.shard(x.T @ y, MESH[:1].T)

    args = random_array((16, 8)), random_array((16, 29))
    low = lowered(fn, *args, inputs=[ROWS, ROWS])
    assert kinds(low) == {"reduce_scatter": 1, "all_reduce": 1}
    assert sent(low) == 8 * 29 * 4 * 3 // 4 + 2 * (2 * 29 * 4) // 2
    args = random_array((16, 8)), random_array((16, 5))  # so little that one collective is better
    low = lowered(fn, *args, inputs=[ROWS, ROWS])
    assert kinds(low) == {"all_reduce": 1}


def test_scattered_unevenly_within_and_summed_across():
    def fn(x, y):
        return gshard.shard(x.T @ y, MESH[:1].T)

    lowered(fn, random_array((13, 7)), random_array((13, 5)), inputs=[ROWS, ROWS])


@st.composite
def programs(draw):
    """Sums of products, scaled, cut and turned around, in loops or not, with gradients or not."""
    steps = draw(st.lists(st.sampled_from(["neg", "scale", "turn", "sum", "add"]), max_size=4))
    loops, grad, cut = draw(st.integers(0, 2)), draw(st.booleans()), draw(st.integers(0, 2))
    carried = draw(assignments(3, 8))
    sizes = [draw(st.sampled_from([3, 7, 8, 13, 16])) for _ in range(3)]

    def once(x, w, v):
        y = x @ w
        for step in steps:
            if step == "neg":
                y = -y
            elif step == "scale":
                y = y * 0.5
            elif step == "turn":
                y = y.T * 2.0
                y = y.T
            elif step == "sum":
                y = y + jnp.sum(x @ w, 1, keepdims=True)
            else:
                y = y + v @ w
        return y[cut:] if cut < 2 else jax.lax.dynamic_slice_in_dim(y, jnp.argmax(v[0]), 1)

    def stacked(x, w, v):
        """A stack of them, made in a loop of its own."""
        if loops < 2:
            return once(x, w, v)[None]
        return jax.lax.scan(lambda c, s: (c, once(x + s, w, v)), 0.0, jnp.arange(2.0))[1]

    def fn(x, w, v):
        if not loops:
            return once(x, w, v)
        start = jnp.ones(jax.eval_shape(stacked, x, w, v).shape)
        start = start if carried is None else gshard.shard(start, carried)
        add = lambda t, s: (t + stacked(x * s, w, v), None)  # noqa: E731
        return jax.lax.scan(add, start, jnp.arange(3.0))[0][0]

    def with_grad(x, w, v):
        if not grad:
            return fn(x, w, v)
        return jax.grad(lambda w: jnp.sum(jnp.sin(fn(x, w, v))))(w)

    a, k, b = sizes
    shapes = [(a, k), (k, b), (a, k)]
    inputs = [draw(assignments(2, 8)) for _ in shapes]
    return with_grad, shapes, inputs, [draw(assignments(2, 8))]


def any_program(program):
    """Its values are those of the unpartitioned one."""
    fn, shapes, inputs, outputs = program
    args = [random_array(s, seed=i) for i, s in enumerate(shapes)]
    wanted = jax.jit(fn)(*args)
    close = {"rtol": 2e-4, "atol": 2e-4}
    assert_same(run(gshard.jit(annotated(fn, inputs, outputs)), *args, **close), wanted, **close)


@given(programs())
def test_random_programs_of_partial_sums(program):
    any_program(program)


@pytest.mark.slow
@settings(max_examples=150)
@given(programs())
def test_many_random_programs_of_partial_sums(program):
    any_program(program)


@pytest.mark.parametrize("rows", [16, 13])
def test_a_split_carry_becomes_a_partial_sum_where_it_lies(rows):
    """FSDP with accumulation: the zeros are not gathered, and neither is anything else of it."""

    def fn(total, xs):
        def add(total, x):
            return total + x.T @ jnp.tanh(x), None

        return gshard.split(jax.lax.scan(add, gshard.split(total, 0, 8), xs)[0], 0, 8)

    args = random_array((rows, rows)), random_array((3, 16, rows))
    low = lowered(fn, *args, inputs=[None, even_split(3, 1, 8)])
    padded = 8 * -(-rows // 8)
    assert kinds(low) == {"reduce_scatter": 1}
    assert sent(low) == padded * rows * 4 * 7 // 8


def test_a_carry_with_copies_counts_once():
    """HSDP: two devices hold each part, of which one may take part in the sum."""
    quarters = MESH[:1].T

    def fn(total, xs):
        def add(total, x):
            return total + x.T @ jnp.tanh(x), None

        return gshard.shard(jax.lax.scan(add, gshard.shard(total, quarters), xs)[0], quarters)

    args = random_array((16, 16)), random_array((3, 512, 16))
    low = lowered(fn, *args, inputs=[None, even_split(3, 1, 8)])
    assert kinds(low) == {"reduce_scatter": 1, "all_reduce": 1}
    assert sent(low) == 16 * 16 * 4 * 3 // 4 + 2 * 4 * 16 * 4 // 2


def test_a_stack_of_partial_sums_waits_for_the_loop_around_it():
    """Gradients of layers in a scan, accumulated over batches in another: summed once each."""

    def loss(weights, x):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        return jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)

    def fn(weights, batches):
        def add(total, x):
            return total + jax.grad(loss)(weights, gshard.split(x, 0, 8)), None

        return jax.lax.scan(add, jnp.zeros_like(weights), batches)[0]

    args = random_array((4, 8, 8)), random_array((3, 256, 8))
    low = lowered(fn, *args)
    assert kinds(low) == {"all_reduce": 1}
    assert sent(low) == 2 * 4 * 8 * 8 * 4 * 7 // 8

    def fsdp(weights, batches):
        return gshard.split(fn(gshard.split(weights, 1, 8), batches), 1, 8)

    assert kinds(gshard.jit(fsdp).lower(*args))["reduce_scatter"] == 1
    lean = gshard.jit(fsdp, memory_limit=64).lower(*args)
    assert kinds(lean)["reduce_scatter"] == 3 * 4  # in both loops: it takes an eighth of the memory


def test_a_table_that_is_also_the_head_is_gathered_once_and_its_gradient_summed_once():
    def loss(table, ids):
        return jnp.mean(jnp.tanh(table[ids] @ table.T) ** 2)

    def step(table, ids):
        grads = jax.grad(loss)(gshard.split(table, 0, 8), gshard.split(ids, 0, 8))
        return gshard.split(grads, 0, 8)

    table = random_array((24, 16))
    low = lowered(step, table, random_array((512,), np.int32) % 24)
    assert kinds(low) == {"all_gather": 1, "reduce_scatter": 1}
    assert sent(low) == 2 * table.nbytes * 7 // 8


SPECS = [(None, None), ("u", None), (None, "u"), ("v", None), (None, "v"), ("u", "v"), ("v", "u")]


@given(*[st.sampled_from(SPECS)] * 3)
@example((None, "v"), ("u", "v"), (None, "v"))  # one axis for both free dims of a product
def test_residual_products_under_any_axes_of_a_mesh(x_spec, a_spec, b_spec):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("u", "v"))
    args = [random_array(s, seed=i) / 8 for i, s in enumerate([(6, 16), (16, 24), (16, 24)])]

    def loss(x, a, b):
        for w in (a, b):
            x = x + jnp.tanh(x @ w @ w.T)
        return jnp.sum(x**2)

    placed = [
        jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
        for x, spec in zip(args, (x_spec, a_spec, b_spec), strict=True)
    ]
    grad = jax.grad(loss, argnums=(1, 2))
    assert_same(
        run(gshard.jit(grad), *placed, rtol=1e-4, atol=1e-4), grad(*args), rtol=1e-4, atol=1e-4
    )


def test_a_maximum_is_not_left_for_a_later_sum():
    """A slice passes on what is unreduced; of the values of the devices it would be their sum."""
    low = check(lambda x: x.max(0)[:2], random_array((16, 8)), inputs=[ROWS])
    assert kinds(low) == {"all_reduce": 1}
    assert sent(low) == 2 * 8 * 4 * 7 // 8
