"""Rows at the borders of tiles: sent, or made again of fewer rows of what they are made of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import gshard
from gshard.moving.fetch import Along, Rows, _needed
from gshard.moving.recompute import Made
from gshard.rules import RULES
from gshard.rules.base.layers import ROW_MAPS
from gshard.tensors.sharding import Sharding, Split
from gshard.tensors.tile import Tile
from tests.oracle import check, even_split, random_array, sent

D = 8


def by(*tiles):
    """A sharding over 8 devices with so many tiles of each dim, the major dim first."""
    coords = np.unravel_index(np.arange(D), (*tiles, D // np.prod(tiles)))
    return Sharding(tuple(Split.of(c) for c in coords[:-1]), D)


def made_by(fn, *arguments, splits):
    """The one operator of a function, on tiles that are split like this, and its result."""
    (eqn,) = jax.make_jaxpr(fn)(*arguments).eqns
    *operands, result = [
        Tile(jnp.zeros(sharding.local_shape(aval.shape)), sharding, aval.shape)
        for aval, sharding in zip(
            [v.aval for v in (*eqn.invars, *eqn.outvars)], splits, strict=True
        )
    ]
    factors, layers = RULES[eqn.primitive].factors, ROW_MAPS.get(eqn.primitive)
    return Made(result, eqn, tuple(operands), None, None, factors, layers)


def test_rows_of_joined_tensors_are_rows_of_each():
    x = jnp.zeros((16, 8))
    along, across = (made_by(lambda a, b, dim=dim: lax.concatenate([a, b], dim), x, x,
                             splits=[by(8, 1)] * 3) for dim in (0, 1))  # fmt: skip
    for made, firsts in [(along, [0, -16]), (across, [0, 0])]:
        found = _needed(made, Rows(made.result, (Along(0, 2 * np.arange(8), 3),)))
        assert [rows.tile for rows in found] == list(made.operands)
        assert [rows.along[0].starts[0] for rows in found] == firsts


def test_rows_are_made_again_of_operands_with_the_same_other_splits_only():
    x, starts = jnp.zeros((16, 8)), 8 * np.arange(2)
    for operand, fits in [(by(2, 4), True), (by(2, 1), False), (by(2, 2), False)]:
        made = made_by(jnp.negative, x, splits=[operand, by(2, 4)])
        found = _needed(made, Rows(made.result, (Along(0, starts, 3),)))
        assert (found is not None) is fits


def test_rows_that_change_their_order_are_not_made_again():
    x, starts = jnp.zeros((16, 8)), 2 * np.arange(8)
    for dim, fits in [(0, False), (1, True)]:
        made = made_by(lambda x, dim=dim: lax.rev(x, (dim,)), x, splits=[by(8, 1)] * 2)
        assert (_needed(made, Rows(made.result, (Along(0, starts, 3),))) is not None) is fits


@pytest.mark.parametrize("times", [2, 3])
def test_repeated_rows_are_sent_before_they_are_repeated(times):
    """100 rows are in tiles of 13, and 200 in tiles of 25: four of the rows move, or three."""
    x = random_array((100, 3))
    low = check(lambda x: jnp.repeat(x, times, axis=0), x, inputs=[even_split(2, 0, D)], exact=True)
    assert sent(low) == {2: 4, 3: 3}[times] * 12


@pytest.mark.parametrize("mode", ["constant", "wrap", "reflect", "edge"])
@pytest.mark.parametrize("rows", [64, 61])
def test_a_convolution_of_a_padded_tensor_sends_its_border_rows(mode, rows):
    """The tiles of the padded tensor begin elsewhere, and would get all but one of their rows."""
    x = np.random.default_rng(0).normal(size=(2, rows, 20, 4)).astype("float32")
    kernel = np.random.default_rng(1).normal(size=(3, 3, 4, 4)).astype("float32")

    def fn(x):
        padded = jnp.pad(gshard.split(x, 1, D), ((0, 0), (1, 1), (1, 1), (0, 0)), mode=mode)
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(padded, kernel, (1, 1), "VALID", dimension_numbers=numbers)

    check(fn, x)
    assert sent(gshard.jit(fn).lower(x)) == 2 * x[:, :1].nbytes


def test_windows_of_a_padded_tensor_with_strides():
    x = np.random.default_rng(0).normal(size=(2, 64, 24, 4)).astype("float32")

    def fn(x):
        pads = ((0, 0), (1, 1), (2, 1), (0, 0))
        padded = jnp.pad(gshard.split(x, 1, D), pads, constant_values=-1.0)
        return lax.reduce_window(padded, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "VALID")

    check(fn, x)
    assert sent(gshard.jit(fn).lower(x)) == x[:, :1].nbytes


def test_windows_of_a_padded_tensor_in_tiles_of_two_dims():
    """Rows come along one dim after the other, with the corners, and are padded when they come."""
    x = np.random.default_rng(0).normal(size=(34, 60, 3)).astype("float32")
    kernel = np.random.default_rng(1).normal(size=(3, 3, 3, 3)).astype("float32")

    def fn(x):
        padded = jnp.pad(x, ((1, 1), (1, 1), (0, 0)), mode="edge")[None]
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(padded, kernel, (1, 1), "VALID", dimension_numbers=numbers)

    low = check(fn, x, inputs=[np.arange(8).reshape(2, 4, 1)])
    assert sent(low) == (15 + 2 * 19) * 3 * 4, low.collectives


def test_rows_keep_what_is_masked_along_other_dims():
    """Two features in three tiles: the third tile's are garbage, which the kernel's zeros meet."""
    x, kernel = random_array((1, 2, 30)), random_array((4, 2, 5))
    split = np.array([7, 5, 0, 3, 1, 2]).reshape(1, 3, 2)

    def fn(x, kernel):
        return lax.conv_general_dilated(x, kernel, (2,), [(2, 2)], (2,), (3,))

    check(fn, x, kernel, inputs=[split, split], rtol=1e-4, atol=1e-4)
