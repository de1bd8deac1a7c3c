"""Sentences that join and leave a search, beside each one searched alone."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gshard.mt.batching.tokenizer import PAD
from gshard.mt.decoding.on_device import beam_search
from gshard.mt.decoding.pool import Pool
from gshard.mt.decoding.search import BeamConfig
from tests.nn import models

LONGEST, MOST = 8, (3, 11)
LENGTHS = {"dense": (8,), "experts": (4, 8), "stacked": (8,)}  # of sources where they join
CHANGES = {"dense": {"experts": 0}, "experts": {}, "stacked": {"stacked": True}}
ROWS = {"dense": 8, "experts": 10, "stacked": 10}  # 10 are 8 while few are searched
CONFIG = BeamConfig(beam=2, nbest=2, max_length=max(MOST), alpha=0.6)


@functools.cache
def model_of(kind):
    return models.model(models.config(**CHANGES[kind]))


@functools.cache
def pool_of(kind, forces=False):
    return Pool(model_of(kind), CONFIG, ROWS[kind], LONGEST, forces=forces)


@functools.cache
def search_of(kind, most):
    config = BeamConfig(CONFIG.beam, CONFIG.nbest, most, CONFIG.alpha)
    return jax.jit(lambda m, s, forced: beam_search(m, s, config, forced=forced))


@functools.cache
def alone(kind, ids, most, forced):
    """The n-best list of one sentence: tokens and scores."""
    source = np.full((1, LONGEST), PAD, np.int32)
    source[0, : len(ids)] = ids
    first = None if forced == PAD else np.int32(forced)
    return listed(search_of(kind, most)(model_of(kind), source, first))


def listed(found):
    tokens, scores, lengths = (np.asarray(part[0]) for part in found[:3])
    return [(t[:n].tolist(), float(s)) for t, s, n in zip(tokens, scores, lengths, strict=True)]


def sentence(number):
    """A source and the largest length of its translation."""
    rng = np.random.default_rng(number)
    ids = tuple(rng.integers(4, 23, rng.integers(1, LONGEST + 1)).tolist())
    return ids, int(rng.choice(MOST))


def waiting(kind, key, number, forced=PAD):
    ids, most = sentence(number)
    length = next(n for n in LENGTHS[kind] if len(ids) <= n)
    return key, ids, length, most, forced


def check(pool, kind, arrivals, forced=PAD):
    """`arrivals` are numbers of sentences, which come so many turns of the pool after the last."""
    assert not len(pool)
    found, arrivals = {}, list(arrivals)
    asked = [number for number, _ in arrivals]
    turn = 0
    while arrivals or len(pool):
        while arrivals and arrivals[0][1] <= turn:
            number, turn = arrivals.pop(0)[0], 0
            pool.add(*waiting(kind, (len(found), number, len(arrivals)), number, forced))
        found |= dict(pool.run())
        turn += 1
    assert sorted(key[1] for key in found) == sorted(asked)
    for (_, number, _), translations in found.items():
        got, want = listed(translations), alone(kind, *sentence(number), forced)
        assert [tokens for tokens, _ in got] == [tokens for tokens, _ in want]
        np.testing.assert_allclose([s for _, s in got], [s for _, s in want], rtol=1e-4)


@pytest.mark.parametrize(
    "kind", ["dense", *(pytest.param(k, marks=pytest.mark.slow) for k in ("experts", "stacked"))]
)
def test_a_sentence_becomes_what_it_is_alone(kind):
    turns = [0, 0, 1, 0, 2, 1, *[0] * 14, 3, 1]  # more than there are rows
    check(pool_of(kind), kind, list(enumerate(turns)))


@pytest.mark.slow
@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), max_size=40))
def test_whenever_they_come(arrivals):
    check(pool_of("experts"), "experts", arrivals)


@pytest.mark.slow
def test_every_translation_begins_with_its_own_token():
    pool = pool_of("dense", True)
    for number, forced in enumerate((5, 9)):
        pool.add(*waiting("dense", number, 3, forced))
    found = {}
    while len(pool):
        found |= dict(pool.run())
    for number, forced in enumerate((5, 9)):
        tokens, _ = listed(found[number])[0]
        assert tokens[0] == forced
        assert tokens == alone("dense", *sentence(3), forced)[0][0]


def test_a_short_sentence_leaves_before_a_long_one_that_came_first():
    pool, order = pool_of("dense"), []
    for key, most in (("long", 11), ("short", 2)):
        pool.add(key, (4, 5, 6), 8, most)
        order += [key for key, _ in pool.run()]
    while len(pool):
        order += [key for key, _ in pool.run()]
    assert order == ["short", "long"]


def test_who_left_costs_no_row():
    pool = pool_of("dense")
    for key in range(15):  # more than there are rows
        pool.add(*waiting("dense", key, 3))
    list(pool.run())
    pool.drop(lambda key: key != 14)
    assert len(pool) == 1
    found = {}
    while len(pool):
        found |= dict(pool.run())
    assert list(found) == [14]
    assert listed(found[14])[0][0] == alone("dense", *sentence(3), PAD)[0][0]
