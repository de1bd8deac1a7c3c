"""Small collectives of one kind are combined: fewer of them, the same bytes and values."""

import importlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gshard
from gshard.graph.history import program_text
from gshard.moving.costs import LATENCIES
from tests.capture.simplify.texts import dedent
from tests.oracle import assert_same, check, even_split, kinds, random_array, run, sent

combinations = importlib.import_module("gshard.planning.improve.combine")  # not the pass itself

ROWS, COLUMNS = even_split(2, 0, 8), even_split(2, 1, 8)


def operations(low, kind):
    """How many collectives of a kind run, however many values they move."""
    return sum(c.count for c in low.collectives if c.kind == kind)


def gradients(count):
    """A data-parallel training step with so many weights, of different shapes."""

    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def step(weights, x):
        grads = jax.grad(loss)(weights, gshard.split(x, 0, 8))
        return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)]

    sizes = [5 + i % 3 for i in range(count + 1)]
    # Small weights: a deep stack of large ones is chaos, in which rounding grows.
    weights = [0.3 * random_array(shape) for shape in itertools.pairwise(sizes)]
    return step, weights, random_array((16, sizes[0]))


def test_the_gradients_of_19_weights_are_one_all_reduce():
    step, weights, x = gradients(19)
    low = check(step, weights, x, rtol=1e-4, atol=1e-4)
    (reduce,) = low.collectives
    assert (reduce.kind, reduce.count, reduce.values) == ("all_reduce", 1, 19)
    assert reduce.bytes == sum(2 * w.nbytes * 7 // 8 for w in weights)
    assert sorted(c.bytes for c in reduce.members) == sorted(2 * w.nbytes * 7 // 8 for w in weights)
    assert all("test_combine.py" in c.source for c in reduce.members)
    assert reduce.reason.startswith("19 values combined: dot_general: partial results")
    assert all("together" not in c.reason for c in reduce.members)


def test_two_gathers_become_one():
    """Plan in, plan out."""

    def fn(x, y):
        return gshard.replicate(jnp.sin(gshard.split(x, 0, 4))), gshard.replicate(
            gshard.split(y, 1, 4)
        )

    lowered = gshard.jit(fn, devices=4).lower(jnp.ones((8, 3)), jnp.ones((2, 4)))
    found = lowered._program.history.programs
    assert program_text(found["expand"]) == dedent("""
        program (a:f32[2,3], b:f32[2,1])
          c:f32[2,3] = sin a
          d:f32[8,3] = all-gather[dim 0 over 4] c
          e:f32[2,4] = all-gather[dim 1 over 4] b
          return d, e
    """)
    assert program_text(found["combine"]) == dedent("""
        program (a:f32[2,3], b:f32[2,1])
          c:f32[2,3] = sin a
          d:f32[6] = reshape[new_sizes=(6,)] c
          e:f32[2] = reshape[new_sizes=(2,)] b
          f:f32[8] = concatenate d e
          g:f32[32] = all-gather[dim 0 over 4] f
          h:f32[4,8] = reshape[new_sizes=(4, 8)] g
          i:f32[4,6] = slice[start_indices=(0, 0) limit_indices=(4, 6) strides=(1, 1)] h
          j:f32[4,2,3] = reshape[new_sizes=(4, 2, 3)] i
          k:f32[8,3] = reshape[new_sizes=(8, 3)] j
          l:f32[4,2] = slice[start_indices=(0, 6) limit_indices=(4, 8) strides=(1, 1)] h
          m:f32[4,2,1] = reshape[new_sizes=(4, 2, 1)] l
          n:f32[2,4,1] = transpose[permutation=(1, 0, 2)] m
          o:f32[2,4] = reshape[new_sizes=(2, 4)] n
          return k, o
    """)


def test_what_is_combined_is_explained_line_by_line():
    def fn(a, b, x):
        left = gshard.replicate(a)
        right = gshard.replicate(b)
        return left @ x, right @ x

    args = random_array((8, 5)), random_array((16, 5)), random_array((5, 3))
    low = check(fn, *args, inputs=[ROWS, ROWS])
    (gather,) = low.collectives
    assert (gather.kind, gather.values) == ("all_gather", 2)
    assert "and 1 more line  " in str(gather)
    assert [c.bytes for c in gather.members] == [7 * 5 * 4, 7 * 2 * 5 * 4]
    text = str(low.explain("h200", seconds=0))
    for c in gather.members:
        assert c.source.split("/")[-1] in text
    assert low.forecast("h200").step_seconds > 0


def test_all_kinds_along_any_dim():
    """Values of different shapes, gathered and scattered along different dims, uneven ones too."""

    def fn(a, b, c, d):
        gathered = gshard.replicate(a), gshard.replicate(b)
        first = gshard.split(c @ d, 0, 8)
        second = gshard.split(c @ (2 * d), 1, 8)
        most = jnp.max(c, 1), jnp.max(d, 0)
        return gathered, first, second, most

    args = [random_array(s, seed=i) for i, s in enumerate([(13, 3), (4, 16), (16, 24), (24, 8)])]
    low = check(fn, *args, inputs=[ROWS, COLUMNS, COLUMNS, ROWS], rtol=1e-4, atol=1e-4)
    assert kinds(low) == {"all_gather": 2, "reduce_scatter": 2, "all_reduce": 2}
    for kind in kinds(low):
        assert operations(low, kind) == 1


def test_in_the_body_of_a_loop():
    def fn(weights, x):
        def layer(x, weights):
            up, down = weights
            return x + jnp.tanh(x @ up) @ down, None

        split = [gshard.split(w, 1, 8) for w in weights]
        return jax.lax.scan(layer, gshard.split(x, 0, 8), split)[0]

    weights = [random_array((3, 8, 16)), random_array((3, 16, 8))]
    low = check(fn, weights, random_array((16, 8)), rtol=1e-4, atol=1e-4)
    (gather,) = [c for c in low.collectives if c.kind == "all_gather"]
    assert (gather.count, gather.values) == (3, 2)


def test_sums_that_depend_on_each_other_are_taken_one_by_one():
    def fn(a, b):
        x = jnp.tanh(a @ b)  # summed
        y = jnp.tanh(x @ a)  # a product that needs the sum
        return y, jnp.tanh(a @ y.T)  # a sum that needs the product

    args = random_array((8, 16)), random_array((16, 8))
    low = check(fn, *args, inputs=[COLUMNS, ROWS], rtol=1e-4, atol=1e-4)
    assert operations(low, "all_reduce") == kinds(low)["all_reduce"] == 2


def test_sums_with_one_product_between_them_are_taken_one_by_one():
    def fn(a, b, c):
        first = jnp.tanh(jnp.sum(a, 1))  # summed
        product = (first[:, None] * b) @ c  # needs it, and stays split
        return jnp.sum(jnp.tanh(product), 1)  # summed as soon as the product is there

    args = random_array((4, 16)), random_array((4, 4)), random_array((4, 16))
    low = check(fn, *args, inputs=[COLUMNS, None, COLUMNS], rtol=1e-4, atol=1e-4)
    assert operations(low, "all_reduce") == kinds(low)["all_reduce"] == 2


def test_a_sum_that_a_product_needs_does_not_wait_for_one_that_is_ready_later():
    def fn(a, b, c):
        first = jnp.tanh(jnp.sum(a, 1))  # of partial sums
        product = (first[:, None] * c) @ c  # needs it
        second = jnp.tanh(jnp.sum(jnp.sin(b.T @ c), 0))  # of what a later product makes
        return product, second

    args = random_array((4, 16)), random_array((4, 16)), random_array((4, 4))
    low = check(fn, *args, inputs=[COLUMNS, COLUMNS], rtol=1e-4, atol=1e-4)
    assert kinds(low) == {"all_reduce": 2}
    assert operations(low, "all_reduce") == 2


def test_sums_within_groups_wait_for_each_other_as_those_across_groups_do():
    """What is scattered within groups and summed across them waits for the others."""

    def fn(*args):
        pairs = zip(args[:4], args[4:], strict=True)
        return [gshard.shard(x.T @ y, np.arange(4)[:, None]) for x, y in pairs]

    args = [random_array((16, n), seed=i) for n in (8, 29) for i in range(4)]
    low = check(fn, *args, inputs=[ROWS] * 8, rtol=1e-4, atol=1e-4)
    assert kinds(low) == {"reduce_scatter": 4, "all_reduce": 4}
    assert operations(low, "reduce_scatter") == operations(low, "all_reduce") == 1


def test_elementwise_work_waits():
    def fn(a, b):
        first = jnp.tanh(jnp.sum(a, 1))
        second = jnp.tanh(jnp.sum(jnp.sin(b[:, :4] @ b), 1))  # of what a product makes
        return first, second

    args = random_array((4, 16)), random_array((4, 16))
    low = check(fn, *args, inputs=[COLUMNS, COLUMNS], rtol=1e-4, atol=1e-4)
    assert operations(low, "all_reduce") == kinds(low)["all_reduce"] - 1


def test_large_values_are_not_combined_and_combinations_end():
    """A copy must not take longer than the latency that it saves, and combinations are bounded."""

    def fn(*arrays):
        return [gshard.replicate(gshard.split(a, 0, 8)) for a in arrays]

    def found(shape, count):
        args = [jax.ShapeDtypeStruct(shape, jnp.float32)] * count
        return gshard.jit(fn, devices=8).lower(*args).collectives

    assert [c.values for c in found((8, 64), 3)] == [3]
    assert [c.values for c in found((8, 64 * 1024), 3)] == [1, 1, 1]
    many = found((8, 2048), 40)  # 64 KiB each
    assert sum(c.values for c in many) == 40
    assert max(c.values for c in many) == LATENCIES // 4


def test_different_groups_and_types_are_not_combined():
    def fn(a, b, c):
        return [gshard.replicate(x) for x in (a, b, c)]

    args = random_array((8, 4)), random_array((8, 4), np.int32), random_array((8, 4))
    pairs = np.arange(8).reshape(4, 2)[:, :1]
    low = check(fn, *args, inputs=[ROWS, ROWS, pairs], exact=True)
    assert sorted(c.values for c in low.collectives) == [1, 1, 1]


def test_what_the_user_wrote_in_a_manual_region_stays_as_it_is():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ("i",))

    def body(x, y):
        return jax.lax.psum(x, "i"), jax.lax.psum(2 * y, "i")

    spec = jax.sharding.PartitionSpec
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec("i"), out_specs=spec(), check_vma=False)
    low = gshard.jit(mapped, devices=jax.devices()[:8]).lower(
        random_array((8, 4)), random_array((8, 3))
    )
    assert [c.values for c in low.collectives] == [1, 1]


@st.composite
def programs(draw):
    """A random program of sums, products and gathers; values are used once or several times."""
    step = st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(0, 9))
    steps = draw(st.lists(step, min_size=3, max_size=9))

    def fn(a, b):
        values = [gshard.split(a, 0, 8), gshard.split(b, 1, 8)]
        for kind, i, j in steps:
            x, y = values[i % len(values)], values[j % len(values)]
            if kind == 0:
                values.append(jnp.tanh(x @ y / 8))
            elif kind == 1:
                values.append(x + y)
            elif kind == 2:
                values.append(jnp.sin(gshard.replicate(x)))
            elif kind == 3:
                values.append(x * jnp.sum(y, i % 2, keepdims=True) / 8)
            else:
                values.append(gshard.split(jnp.cos(x @ y / 8), j % 2, 8))
        return values

    return fn


@given(programs())
def test_any_program_has_the_same_bytes_and_values_without_combining(fn):
    args = random_array((8, 8)), random_array((8, 8))
    low = check(fn, *args, rtol=1e-3, atol=1e-3)
    together, values, bytes_sent = low.collectives, kinds(low), sent(low)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(combinations, "combinations_of", lambda jaxpr: [])
        apart = gshard.jit(lambda *args: fn(*args)).lower(*args)
    assert kinds(apart) == values
    assert abs(sent(apart) - bytes_sent) <= len(apart.collectives)
    assert all(c.values == 1 for c in apart.collectives)
    assert len(together) <= len(apart.collectives)


def test_under_a_mesh_of_the_user():
    """The mesh that is set is another one than the program's, which has axes of its own."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:6]).reshape(2, 3), ("a", "b"))
    x, w, v = random_array((12, 5)), random_array((5, 3), seed=1), random_array((5, 4), seed=2)

    def loss(weights, x):
        w, v = weights
        return jnp.sum(jnp.tanh(x @ w)) + jnp.sum(jnp.sin(x @ v))

    def sharded(weights, x):
        return loss(weights, jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec("a")))

    wanted = jax.jit(jax.grad(loss))((w, v), x)
    with jax.set_mesh(mesh):
        step = gshard.jit(jax.grad(sharded))
        got, low = run(step, (w, v), x), step.lower((w, v), x)
    assert_same(got, wanted, rtol=1e-4, atol=1e-4)
    assert [(c.kind, c.values) for c in low.collectives] == [("all_reduce", 2)]


def test_sums_over_rows_and_over_columns_of_a_mesh_are_apart():
    mesh = np.arange(8).reshape(2, 4)
    low = check(
        lambda x, y: (jnp.tanh(x.sum(0)), jnp.tanh(y.sum(1))),
        *(random_array((4, 4), seed=i) for i in range(2)),
        inputs=[mesh, mesh],
    )
    assert operations(low, "all_reduce") == kinds(low)["all_reduce"] == 2
