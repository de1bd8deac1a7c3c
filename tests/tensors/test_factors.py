"""Splits of a dim and of its factors: the rows that each device holds, counted one by one."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gshard.tensors.factors import combining, compose, decompose
from gshard.tensors.sharding import Split, compatible

DEVICES = 24


@st.composite
def splits_of_leading_factors(draw):
    """Factors of a dim, and a split of it that is one of them each, up to a part of one."""
    sizes = draw(st.lists(st.sampled_from((1, 2, 3, 4)), min_size=1, max_size=3))
    last = draw(st.integers(0, len(sizes) - 1))
    parts = draw(st.sampled_from([r for r in range(1, sizes[last] + 1) if sizes[last] % r == 0]))
    tiles = (*sizes[:last], parts)
    order = draw(st.permutations(range(DEVICES)))
    coords = np.array(order) % math.prod(tiles)
    return sizes, coords, np.unravel_index(coords, tiles)


@given(splits_of_leading_factors())
@settings(max_examples=60)
def test_a_split_of_leading_factors_is_one_of_each(case):
    sizes, coords, of_each = case
    dim = tuple("abc"[: len(sizes)])
    known = dict(zip(dim, sizes, strict=True))
    split = Split.of(coords)
    wanted = {f: s for f, c in zip(dim, of_each, strict=False) if (s := Split.of(c))}
    assert decompose(split, dim, known) == wanted
    assert compose(dim, wanted, known) is split


@st.composite
def splits_of_factors(draw):
    """Factors of a dim, and a split of each over an axis of its own; 1 tile is no split."""
    sizes = draw(st.lists(st.sampled_from((1, 2, 3, 4)), min_size=2, max_size=3))
    return sizes, [draw(st.integers(1, n)) for n in sizes]


def rows_by_factors(sizes, tiles, coords):
    """The rows of a dim whose factors have these tiles."""
    local = [-(-n // t) for n, t in zip(sizes, tiles, strict=True)]
    own = [np.arange(n)[c * w : (c + 1) * w] for n, c, w in zip(sizes, coords, local, strict=True)]
    return np.arange(math.prod(sizes)).reshape(sizes)[np.ix_(*own)].ravel()


def rows_by_dim(sizes, tiles, number):
    """The rows of a tile of the dim, of as many rows as the parts of its factors make."""
    local = math.prod(-(-n // t) for n, t in zip(sizes, tiles, strict=True))
    return np.arange(math.prod(sizes))[number * local : (number + 1) * local]


@given(splits_of_factors())
@settings(max_examples=100)
def test_factors_are_composed_as_long_as_their_rows_are_one_run(case):
    sizes, tiles = case
    dim = tuple("abc"[: len(sizes)])
    coords = np.indices(tiles).reshape(len(tiles), -1)
    given_splits = dict(zip(dim, map(Split.of, coords), strict=True))
    wanted = None
    for count in range(1, len(dim) + 1):  # the most factors whose tiles are tiles of the dim
        part = [*tiles[:count], *[1] * (len(tiles) - count)]
        number = np.ravel_multi_index(tuple(coords[:count]), tiles[:count])
        shown = [np.where(t > 1, c, 0) for t, c in zip(part, coords, strict=True)]
        devices = range(coords.shape[1])
        if all(
            np.array_equal(
                rows_by_factors(sizes, part, [c[d] for c in shown]),
                rows_by_dim(sizes, part, number[d]),
            )
            for d in devices
        ):
            wanted = Split.of(number)
    assert compose(dim, given_splits, dict(zip(dim, sizes, strict=True))) is wanted


def test_partial_results_of_booleans_are_combined_by_or_and_and():
    for function, wanted in [
        (jnp.any, {"k": "or", "l": "and"}),
        (jnp.sum, {"k": "sum", "l": "prod"}),
    ]:
        x = jnp.zeros(3, bool) if function is jnp.any else jnp.zeros(3)
        eqn = jax.make_jaxpr(function)(x).eqns[-1]
        assert combining(eqn, {"k": "sum", "l": "prod"}) == {"reduced": wanted}


def test_splits_are_compatible_where_every_tile_is_on_equally_many_devices():
    rng = np.random.default_rng(0)
    for _ in range(300):
        splits = [Split.of(rng.permutation([0, 0, 1, 1, *rng.integers(-1, 2, 2)])) for _ in "ab"]
        if None in splits:
            continue
        coords = np.stack([s.coords for s in splits])
        idle = (coords < 0).any(0)
        counts = [
            (np.array(pair) == coords.T).all(1).sum()
            for pair in itertools.product(range(2), repeat=2)
        ]
        wanted = (coords[:, idle] < 0).all() and len(set(counts)) == 1
        assert compatible(tuple(splits)) == wanted
        alone = np.bincount(coords[0][coords[0] >= 0], minlength=2)
        assert compatible((splits[0], None)) == (alone[0] == alone[1])
    assert compatible((Split.of([0, 0, 1, 1, -1]), Split.of([0, 1, 0, 1, -1])))
    assert not compatible((Split.of([0, 0, 1, 1, -1]), Split.of([0, 1, 0, 1, 0])))
