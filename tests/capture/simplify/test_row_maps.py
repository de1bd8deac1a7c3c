"""Row maps of row maps are one operator; program in, program out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gshard.capture.simplify import PASSES
from gshard.capture.simplify.row_maps import compose_row_maps
from tests.capture.simplify.texts import after, dedent

X = np.zeros((8, 2), np.float32)


def composed(fn, *arguments):
    return after(compose_row_maps, fn, *arguments)


def test_a_roll():
    assert composed(lambda x: jnp.concatenate([x[1:], x[:1]]), X) == dedent("""
        program (a:f32[8,2])
          b:f32[8,2] = row_map[layers=(0[1:8, 0:2] at [0:7, 0:2], 0[0:1, 0:2] at [7:8, 0:2])] a
          return b
    """)


def test_a_roll_whose_first_row_is_set_is_a_shift():
    """No row travels from one end to the other."""

    def fn(x, y):
        return jnp.roll(x, 1, axis=0).at[0].set(y)

    assert composed(fn, X, jnp.zeros(2)) == dedent("""
        program (a:f32[8,2], b:f32[2])
          c:f32[1,2] = reshape[new_sizes=(1, 2)] b
          d:f32[8,2] = row_map[layers=(0[0:1, 0:2] at [0:1, 0:2], 1[0:7, 0:2] at [1:8, 0:2])] c a
          return d
    """)


def test_the_gradient_of_a_roll_is_a_roll():
    def fn(x):
        return jax.vjp(lambda x: jnp.roll(x, 3, axis=0), x)[1](x)[0]

    assert composed(fn, X) == dedent("""
        program (a:f32[8,2])
          b:f32[8,2] = row_map[layers=(0[3:8, 0:2] at [0:5, 0:2], 0[0:3, 0:2] at [5:8, 0:2])] a
          return b
    """)


def test_a_tensor_of_which_little_is_used_is_cut_first():
    """Otherwise all of it would be an operand, and be brought to the result's sharding."""

    def fn(x, y):
        return jnp.concatenate([x[:2], y])

    assert "slice[" in composed(fn, X, X)


def test_a_split_into_one_part_changes_nothing():
    """`jax.jacfwd` splits the unit vectors like that, which every device can make."""
    assert composed(lambda x: jnp.sin(jax.lax.split(x, (8,))[0]), X) == dedent("""
        program (a:f32[8,2])
          b:f32[8,2] = sin a
          return b
    """)


def test_an_update_in_a_loop_at_an_index_that_jax_hoisted():
    """A gradient's index is a constant of the scan, whose value is known outside."""

    def fn(xs):
        def step(carry, x):
            return carry.at[0].set(x).at[1:].set(carry[:-1]), carry[-1]

        return jax.lax.scan(step, jnp.zeros((4, 2)), xs)[0]

    assert "scatter" not in composed(fn, X)


@pytest.mark.parametrize("update", [jnp.sin, lambda x: x * 2])
def test_an_update_that_is_computed_from_what_is_there_stays(update):
    assert "scatter" in composed(lambda x: x.at[3].apply(update), X)


def test_rows_that_are_cut_off_behind_are_not_there_any_more():
    def fn(x):
        cut = jax.lax.pad(x, 0.0, ((1, -2, 0), (0, 0, 0)))
        return jnp.concatenate([cut, x[:1]])

    text = composed(fn, X)
    assert "0[] at [0:1, 0:2], 1[0:6, 0:2] at [1:7, 0:2], 1[0:1, 0:2] at [7:8, 0:2]" in text


def test_every_other_row():
    text = composed(lambda x: jnp.concatenate([x[::2], x[:4]]), X)
    assert "0[0:8:2, 0:2] at [0:4, 0:2], 0[0:4, 0:2] at [4:8, 0:2]" in text


def padded(x, low, high, value=0.0):
    return jax.lax.pad(x, value, ((low, high, 0), (0, 0, 0)))


def test_rows_that_are_padded_with_something_are_not_those_of_a_sum():
    assert " add " in composed(lambda x: padded(x[:4], 0, 4, 1.0) + padded(x[4:], 4, 0, 2.0), X)


def test_a_sum_of_rows_that_overlap_stays():
    assert " add " in composed(lambda x: padded(x[:3], 0, 5) + padded(x[2:6], 2, 2), X)
    assert " add " not in composed(lambda x: padded(x[:3], 0, 5) + padded(x[3:6], 3, 2), X)
    assert " add " not in composed(lambda x: padded(x[:3], 0, 5) + padded(x[3:], 3, 0), X)


OPERATIONS = {
    "slice": lambda x, i: x[i % len(x) : len(x)],
    "cut": lambda x, i: x[: 1 + i % len(x)],
    "roll": lambda x, i: jnp.roll(x, i, axis=0),
    "pad": lambda x, i: jnp.pad(x, ((i % 3, 1), (0, 0)), constant_values=i),
    "less": lambda x, i: jax.lax.pad(x, 0.0, ((-(i % len(x)), 0, 0), (0, 0, 0))),
    "set": lambda x, i: x.at[i % len(x)].set(7.0),
    "set rows": lambda x, i: x.at[i % len(x) :].set(3.0),
    "twice": lambda x, i: jnp.concatenate([x, x]),
    "around": lambda x, i: jnp.concatenate([x[i % len(x) :], x + 1.0, x[: i % len(x)]]),
    "apart": lambda x, i: jax.lax.split(x, (i % len(x), len(x) - i % len(x)), axis=0)[1],
    "sum": lambda x, i: jnp.pad(x, ((0, len(x)), (0, 0))) + jnp.pad(x, ((len(x), 0), (0, 0))),
    "columns": lambda x, i: jnp.concatenate([x[:, 1:], x[:, :1]], axis=1),
    "set column": lambda x, i: x.at[:, i % x.shape[1]].set(x[:, 0] * 2),
    "set a column": lambda x, i: x.at[:, i % x.shape[1]].set(x[:, 0] * 2)[:, i % x.shape[1] :],
    "set a row": lambda x, i: x.at[i % len(x)].set(x[0] * 2)[i % len(x) :],
    "pair": lambda x, i: jnp.stack([x, x * 2], axis=2).at[:, :, i % 2].set(x)[:, :, i % 2],
    "broadcast": lambda x, i: jnp.broadcast_to(x[:, None], (len(x), 2, x.shape[1]))[:, i % 2],
    "spread": lambda x, i: jnp.broadcast_to(x[:1], (len(x) + 1, x.shape[1]))[i % len(x) :],
    "product": lambda x, i: (x @ x.T @ x)[::-1],
}


def in_loop(operation, x, number):
    """An operation twice in a loop, if it keeps the shape; else once."""
    if jax.eval_shape(lambda x: operation(x, number), x).shape != x.shape:
        return operation(x, number)
    return jax.lax.fori_loop(0, 2, lambda _, x: operation(x, number), x)


@pytest.mark.parametrize("simplified_by", PASSES)
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 7), st.booleans()),
        max_size=5,
    ),
    st.integers(1, 6),
)
def test_any_composition_keeps_its_values(simplified_by, steps, rows):
    """`after` compares them. A pass that has nothing to do leaves a program as it is."""

    def fn(x):
        for name, number, looped in steps:
            x = (in_loop if looped else lambda op, *of: op(*of))(OPERATIONS[name], x, number)
        return x

    x = np.ones((rows, 2))
    after(simplified_by, fn, x)
    after(simplified_by, lambda x: jax.vjp(fn, x)[1](jnp.ones(jax.eval_shape(fn, x).shape)), x)


@pytest.mark.parametrize("ndim", [2, 3])
def test_rows_of_an_update_that_lacks_their_dim(ndim):
    """jax-md's neighbour lists in a loop, splines: a part of what was set is taken again."""
    x = np.zeros((8, 3, 2)[:ndim])

    def fn(x, y):
        return jax.lax.fori_loop(
            0, 2, lambda _, c: c + jnp.sum(x.at[..., 1].set(y + c)[..., 1:2], axis=-1), y
        )

    assert "= slice[" in composed(fn, x, x[..., 0])
