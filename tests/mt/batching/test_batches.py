import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gshard.errors import UserError
from gshard.mt.batching.batches import BatchConfig, Batches, Cycle, Host, Stream
from gshard.mt.batching.tokenizer import END, PAD, START

NAMES = {
    "source",
    "source_segments",
    "source_positions",
    "inputs",
    "labels",
    "target_segments",
    "target_positions",
}
CONFIG = BatchConfig(rows=8, source_length=48, target_length=48)


def equal(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def config_of(seed=0, **more):
    return BatchConfig(8, 48, 48, seed=seed, **more)


@settings(max_examples=6)
@given(st.integers(0, 5), st.integers(0, 300))
def test_a_batch_is_a_function_of_seed_and_step(tokens, seed, step):
    one, other = (Batches(tokens, config_of(seed)) for _ in range(2))
    for k in (step + 40, 3, step):  # in whatever order they are asked for
        one[k]
    assert equal(one[step], other[step])
    assert not equal(one[step], Batches(tokens, config_of(seed + 1))[step])


@settings(max_examples=6)
@given(st.integers(0, 20), st.integers(1, 4))
def test_resuming_goes_on_exactly(tokens, stop, more):
    batches = Batches(tokens, config_of())
    iterator = batches.iterate()
    for _ in range(stop):
        next(iterator)
    state = iterator.get_state()
    rest = [next(iterator) for _ in range(more)]
    resumed = batches.iterate()
    next(resumed)
    resumed.set_state(state)
    by_step = batches.iterate(stop)
    for batch in rest:
        assert equal(batch, next(resumed))
        assert equal(batch, next(by_step))
    assert resumed.get_state() == iterator.get_state()
    assert resumed.padding == iterator.padding


@settings(max_examples=6)
@given(st.sampled_from([2, 4]), st.integers(0, 100))
def test_hosts_read_disjoint_parts_of_one_batch(tokens, count, step):
    whole = Batches(tokens, config_of())[step]
    parts = [Batches(tokens, config_of(), Host(i, count))[step] for i in range(count)]
    for name, array in whole.items():
        assert np.array_equal(np.concatenate([part[name] for part in parts]), array)


@pytest.mark.slow
def test_workers_change_nothing(tokens):
    expected = Batches(tokens, CONFIG)
    iterator = Batches(tokens, CONFIG, workers=2, ahead=2).iterate(5)
    try:
        for step in range(5, 9):
            assert equal(next(iterator), expected[step])
    finally:
        iterator.close()


def sentences(batch, b):
    """The (source, inputs, labels) of each segment of row b, and checks on the way."""
    found = []
    for segment in range(1, batch["source_segments"][b].max() + 1):
        mine = batch["source_segments"][b] == segment
        theirs = batch["target_segments"][b] == segment
        assert batch["source_positions"][b][mine].tolist() == list(range(mine.sum()))
        assert batch["target_positions"][b][theirs].tolist() == list(range(theirs.sum()))
        labels = batch["labels"][b][theirs]
        inputs = batch["inputs"][b][theirs]
        assert inputs[0] == START
        assert labels[-1] == END
        assert np.array_equal(inputs[1:], labels[:-1])
        found.append((tuple(batch["source"][b][mine]), tuple(labels)))
    return found


def test_batches_hold_examples_of_the_corpus(tokens):
    known = {
        (tuple(examples.source[i]), tuple(examples.target[i]))
        for examples in tokens
        for i in range(len(examples))
    }
    batches = Batches(tokens, config_of(languages=True))
    for step in range(12):
        batch = batches[step]
        assert batch.keys() == NAMES | {"languages"}
        for b in range(len(batch["source"])):
            found = sentences(batch, b)
            assert set(found) <= known
        empty = batch["source_segments"] == 0
        assert (batch["source"][empty] == PAD).all()
        assert (batch["languages"][empty] == -1).all()
        assert (batch["languages"][~empty] >= 0).all()


def test_packing_leaves_little_padding(tokens):
    packed = Batches(tokens, config_of()).iterate()
    for _ in range(30):
        next(packed)
    assert packed.padding < 0.35


@pytest.mark.parametrize("temperature", [1.0, 5.0, float("inf")])
def test_the_mixture_follows_the_temperature(tokens, temperature):
    batches = Batches(tokens, config_of(temperature=temperature, languages=True))
    seen = np.zeros(len(tokens))
    for step in range(200):
        batch = batches[step]
        first = (batch["source_positions"] == 0) & (batch["source_segments"] > 0)
        seen += np.bincount(batch["languages"][first], minlength=len(tokens))
    sizes = np.array([len(examples) for examples in tokens], float)
    expected = sizes ** (1 / temperature) / (sizes ** (1 / temperature)).sum()
    assert np.abs(seen / seen.sum() - expected).max() < 0.05


def test_an_epoch_has_every_example_once():
    examples = np.array([3, 5, 8, 13, 21])
    stream = Stream([(0, examples, 1.0)], seed=4)
    rounds = [[i for _, i in stream.take(5 * r, 5 * r + 5)] for r in range(6)]
    assert all(sorted(order) == examples.tolist() for order in rounds)
    assert len({tuple(order) for order in rounds}) > 1  # shuffled anew


@given(
    st.lists(st.floats(0.01, 10), min_size=1, max_size=20),
    st.integers(0, 9),
    st.integers(0, 10**6),
)
def test_a_schedule_counts_each_part_up(weights, seed, start):
    schedule = Cycle(weights, seed)
    part, key = schedule.locate(np.arange(start, start + 3000))
    for p in range(len(weights)):
        keys = key[part == p]
        assert np.array_equal(keys, np.arange(len(keys)) + (keys[0] if len(keys) else 0))


def test_mistakes_are_named(tokens, monkeypatch):
    with pytest.raises(UserError, match="do not divide among 3 hosts"):
        Batches(tokens, CONFIG, Host(0, 3))
    with pytest.raises(UserError, match="nothing to sample"):
        Batches(tokens, BatchConfig(8, 2, 2))
    with pytest.raises(UserError, match="short_weight"):
        BatchConfig(short_weight=0)
    monkeypatch.setitem(sys.modules, "grain", None)
    without = Batches(tokens, CONFIG)
    assert without[3].keys() == Batches(tokens, CONFIG)[0].keys()  # one by one they need no Grain
    with pytest.raises(UserError, match=r"pip install 'gshard\[mt\]'"):
        without.iterate()
