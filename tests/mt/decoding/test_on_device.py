"""Flat beam search beside a plain one, in Python, that runs the whole model for every prefix."""

import functools
import math

import equinox as eqx
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxprs_in_params

import gshard
from benchmarks.confidence import forced
from gshard.mt.batching.tokenizer import END, PAD, START
from gshard.mt.decoding.on_device import JAX, beam_search, continuations
from gshard.mt.decoding.search import BeamConfig, FlatSearch, Live
from gshard.nn import Batch, Strategy
from tests.nn import models
from tests.oracle import kinds

ROWS = 8  # of the batch in which the plain search runs its prefixes


def sources(B, L, seed):
    """Sentences of all lengths from 1 to L, one of them with L tokens."""
    rng = np.random.default_rng(seed)
    source = rng.integers(4, 23, (B, L)).astype(np.int32)
    for row in source[1:]:
        row[rng.integers(1, L + 1) :] = PAD
    return source


@functools.lru_cache
def forward():
    def run(model, source, inputs):
        batch = Batch.of(source, inputs)
        batch = batch._replace(inputs=inputs, target_segments=np.ones(inputs.shape, np.int32))
        return jax.nn.log_softmax(model(batch)[0])

    return jax.jit(run)


def log_probs(model, sentence, prefixes, T):
    """The log-probabilities after each prefix."""
    found = []
    source = np.broadcast_to(sentence, (ROWS, len(sentence)))
    for i in range(0, len(prefixes), ROWS):
        inputs = np.full((ROWS, T), START, np.int32)
        some = prefixes[i : i + ROWS]
        for row, prefix in zip(inputs, some, strict=False):
            row[1 : 1 + len(prefix)] = prefix
        probs = np.asarray(forward()(model, source, inputs))
        found += [probs[r, len(prefix)] for r, prefix in enumerate(some)]
    return found


def plain_beam_search(model, sentence, config):
    """The n-best [(score, tokens)] of one sentence: lists, sorting, and no early stop by a bound.

    Every continuation is written down and sorted, so the ranks of the ends are what they are.
    """
    live, ended = [(0.0, [])], []
    for length in range(1, config.max_length + 1):
        rows = log_probs(model, sentence, [tokens for _, tokens in live], config.max_length)
        candidates = [
            (score + float(p), [*tokens, token])
            for (score, tokens), row in zip(live, rows, strict=True)
            for token, p in enumerate(row)
            if token not in config.banned
        ]
        candidates.sort(key=lambda c: -c[0])
        last = length == config.max_length
        norm = ((5 + length) / 6) ** config.alpha
        for score, tokens in candidates if last else candidates[: config.beam]:
            if tokens[-1] == END:
                ended.append((score / norm, tokens))
        live = [c for c in candidates if c[1][-1] != END][: config.beam]
        if len(ended) >= config.beam or not live:
            break
    return sorted(ended, key=lambda e: -e[0])[: config.nbest]


def check_equal(found, model, source, config):
    for b, sentence in enumerate(source):
        want = plain_beam_search(model, sentence, config) if sentence.any() else []
        for n in range(config.nbest):
            score, tokens = want[n] if n < len(want) else (-math.inf, [])
            padded = tokens + [PAD] * (config.max_length - len(tokens))
            assert found.tokens[b, n].tolist() == padded
            assert found.lengths[b, n] == len(tokens)
            np.testing.assert_allclose(found.scores[b, n], score, rtol=1e-4, atol=1e-4)


def check(B, L, vocab, experts, config, seeds):
    run = jax.jit(lambda model, source: beam_search(model, source, config))
    for seed in seeds:
        model = models.model(models.config(target_vocab=vocab, experts=experts), seed)
        source = sources(B, L, seed)
        check_equal(jax.tree.map(np.asarray, run(model, source)), model, source, config)


@pytest.mark.parametrize(
    ("B", "vocab", "experts", "config"),
    [
        (3, 9, 4, BeamConfig(beam=4, nbest=4, max_length=6, alpha=0.6)),
        (2, 6, 0, BeamConfig(beam=5, nbest=3, max_length=6, alpha=0.0)),
    ],
    ids=["experts", "fewer words than beam"],
)
def test_equal_to_a_plain_beam_search(B, vocab, experts, config):
    check(B, 5, vocab, experts, config, range(4))


@pytest.mark.parametrize("vocab", [256, 300, 5])
def test_candidates_are_those_of_all_scores_sorted(vocab):
    """In spans and one by one, with many equal scores, silent tokens that lead, and no hope."""
    rng = np.random.default_rng(vocab)
    config = BeamConfig(beam=4, max_length=3)
    logits = rng.integers(0, 6, (30, 4, vocab)).astype(np.float32)
    logits[:5, :, :4] = 50.0
    before = rng.integers(-3, 0, (30, 4)).astype(np.float32)
    before[10:, 1:] = -np.inf
    live = Live(np.zeros((30, 4), int), before, np.tile(np.eye(4, 12, dtype=bool), (30, 1, 1)))
    search = FlatSearch(config, JAX, step=lambda *_: pytest.fail("unused"))

    @jax.jit
    def extended(live, logits):
        found = continuations(live, logits, config)
        return found.ends, search.extend(live, found)

    ends, after = extended(live, logits)
    scores = np.array(before[..., None] + jax.jit(jax.nn.log_softmax)(logits))
    np.testing.assert_array_equal(ends, scores[..., END])
    scores[..., [*config.banned, END]] = -np.inf
    flat = scores.reshape(30, -1)
    want = np.argsort(-flat, axis=1, kind="stable")[:, :4]
    np.testing.assert_array_equal(after.scores, np.take_along_axis(flat, want, axis=1))
    real = np.isfinite(np.asarray(after.scores))
    np.testing.assert_array_equal(np.asarray(after.tokens)[real], (want % vocab)[real])
    parents = np.argmax(after.ancestry, axis=2)
    np.testing.assert_array_equal(parents[real], (want // vocab)[real])


@st.composite
def searches(draw):
    beam = draw(st.integers(1, 9))
    return BeamConfig(
        beam=beam,
        nbest=draw(st.integers(1, beam)),
        max_length=draw(st.integers(1, 12)),
        alpha=draw(st.sampled_from([0.0, 0.3, 0.6, 1.0, 2.0])),
    )


@pytest.mark.slow
@settings(max_examples=25)
@given(
    config=searches(),
    B=st.integers(1, 7),
    L=st.integers(1, 9),
    vocab=st.integers(5, 40),
    experts=st.sampled_from([0, 4]),
    seed=st.integers(0, 1000),
)
def test_equal_to_a_plain_beam_search_at_any_size(config, B, L, vocab, experts, seed):
    check(B, L, vocab, experts, config, range(seed, seed + 4))


@pytest.mark.slow
@settings(max_examples=2)
@given(config=searches(), B=st.integers(1, 3), vocab=st.integers(5, 12), seed=st.integers(0, 99))
def test_equal_to_a_plain_beam_search_at_some_sizes(config, B, vocab, seed):
    check(B, 5, vocab, 0, config, [seed])


@pytest.mark.slow
def test_beam_1_is_greedy():
    config = BeamConfig(beam=1, max_length=8, alpha=1.0)
    run = jax.jit(lambda model, source: beam_search(model, source, config))
    for seed in range(4):
        model = models.model(models.config(target_vocab=7, experts=0), seed)
        source = sources(4, 5, seed)
        found = run(model, source)
        for b, sentence in enumerate(source):
            said: list[int] = []
            while END not in said:
                (row,) = log_probs(model, sentence, [said], 8)
                row = np.where(np.isin(np.arange(7), config.banned), -np.inf, row)
                said.append(END if len(said) == 7 else int(np.argmax(row)))
            assert found.tokens[b, 0, : found.lengths[b, 0]].tolist() == said


def ending(model, strength):
    """The model with an END that is likelier by far: every state of the decoder leans to it."""
    table = np.array(model.target.table)
    bias = np.array(model.decoder_norm.bias)
    table[END], bias[:] = strength, 1.0
    return eqx.tree_at(lambda m: (m.target.table, m.decoder_norm.bias), model, (table, bias))


@pytest.mark.slow
def test_padding_sentences_cost_nothing_and_the_search_stops_early():
    config = BeamConfig(beam=3, nbest=2, max_length=9)
    run = jax.jit(lambda model, source: beam_search(model, source, config))
    model = models.model(models.config())
    source = sources(4, 5, 0)
    source[[1, 3]] = PAD
    found = run(model, source)
    assert (np.asarray(found.tokens)[[1, 3]] == PAD).all()
    assert np.isneginf(np.asarray(found.scores)[[1, 3]]).all()
    assert (np.asarray(found.lengths)[[1, 3]] == 0).all()
    check_equal(jax.tree.map(np.asarray, found), model, source, config)

    assert run(model, np.full_like(source, PAD)).steps == 0
    soon = run(ending(model, 1.0), source)
    assert soon.steps < 5
    check_equal(jax.tree.map(np.asarray, soon), ending(model, 1.0), source, config)


@pytest.mark.slow
def test_padding_at_the_end_changes_nothing():
    config = BeamConfig(beam=3, nbest=2, max_length=5)
    model = models.model(models.config(target_vocab=9))
    source = sources(3, 5, 1)
    padded = np.pad(source, ((0, 2), (0, 3)))
    run = jax.jit(lambda model, source: beam_search(model, source, config))
    want, found = run(model, source), run(model, padded)
    np.testing.assert_array_equal(found.tokens[:3], want.tokens)
    np.testing.assert_allclose(found.scores[:3], want.scores, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("experts", "groups"), [(8, None), (12, 8)])
def test_eight_devices_find_what_one_finds(experts, groups):
    """Five sentences over 8 devices are uneven, and so are 12 experts."""
    config = BeamConfig(beam=3, nbest=2, max_length=5)
    model = models.model(models.config(target_vocab=9, experts=experts, groups=groups))
    source = sources(5, 5, 2)
    want = jax.jit(lambda m, s: beam_search(m, s, config))(model, source)
    search = gshard.jit(lambda m, s: beam_search(m, s, config, Strategy(8)))
    found = search(model, source)
    np.testing.assert_array_equal(found.tokens, want.tokens)
    np.testing.assert_array_equal(found.lengths, want.lengths)
    np.testing.assert_allclose(found.scores, want.scores, rtol=1e-4)
    assert found.steps == want.steps
    if experts == 8:  # uneven ones need more to change hands
        assert set(kinds(search.lower(model, source))) == {"all_to_all", "all_reduce"}


def test_keys_and_values_are_written_and_never_gathered():
    """No equation of the step reorders an array as large as a layer's keys."""
    config = BeamConfig(beam=4, max_length=50)
    model, source = models.shapes(models.config()), sources(2, 5, 0)
    jaxpr = jax.make_jaxpr(lambda m, s: beam_search(m, s, config))(model, source)
    keys = 2 * 4 * 50 * models.TINY.heads * models.TINY.key_dim
    (loop,) = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "while"]
    sizes = gathered(loop.params["body_jaxpr"].jaxpr)
    assert sizes
    assert max(sizes) < keys


def gathered(jaxpr):
    sizes = [e.outvars[0].aval.size for e in jaxpr.eqns if e.primitive.name == "gather"]
    for eqn in jaxpr.eqns:
        for sub in jaxprs_in_params(eqn.params):
            sizes += gathered(sub)
    return sizes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beam": 0}, "nbest is from 1 to beam"),
        ({"beam": 2, "nbest": 3}, "the 3 best of a beam of 2"),
        ({"max_length": 0}, "max_length is 0"),
        ({"alpha": -1.0}, "alpha is -1.0"),
        ({"alpha": math.nan}, "alpha is nan"),
        ({"alpha": 1e308}, r"alpha is 1e\+308"),
        ({"banned": (END,)}, "cannot be banned"),
    ],
)
def test_impossible_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        BeamConfig(**settings)


@pytest.mark.slow
def test_scores_of_many_experts_are_those_of_the_forward_pass():
    """32 experts on one device, whose rooms differ from step to step: all read START at first."""
    config = BeamConfig(beam=4, nbest=4, max_length=6)
    dims = models.config(experts=32, dispatch="flat", stacked=False, target_vocab=11)
    model, source = models.model(dims), sources(24, 7, 3)
    found = jax.tree.map(np.asarray, jax.jit(lambda m, s: beam_search(m, s, config))(model, source))
    ids = [row[row != PAD].tolist() for row in source for _ in range(4)]
    lengths = found.lengths.ravel()
    each = zip(found.tokens.reshape(96, 6), lengths, strict=True)
    spoken = [tokens[:length].tolist() for tokens, length in each]
    worth = forced(model, ids, spoken, rows=96) / np.asarray(config.norm(lengths))
    np.testing.assert_allclose(found.scores.ravel(), worth, rtol=1e-4)
    assert len(set(map(tuple, spoken))) > 8
