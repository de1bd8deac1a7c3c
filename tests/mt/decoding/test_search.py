"""The one search in NumPy and under XLA: the same bits where decoders give the same scores."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gshard.mt.batching.tokenizer import END
from gshard.mt.decoding.host.translator import NUMPY
from gshard.mt.decoding.on_device import JAX
from gshard.mt.decoding.search import BeamConfig, Continuations, FlatSearch, SearchState

VOCAB = 7


def table_step(xp, table, config):
    """A decoder whose scores depend on the last token alone, and are given."""

    def step(t, live, cache):
        scores = live.scores[:, :, None] + xp.asarray(table)[live.tokens]
        ends = scores[:, :, END]
        silent = np.isin(np.arange(VOCAB), [*config.banned, END])
        flat = xp.where(silent, -xp.inf, scores).reshape(len(scores), -1)
        places = xp.broadcast_to(xp.arange(flat.shape[1]), flat.shape)
        return Continuations(flat, places, ends, VOCAB), cache + 1

    return step


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    beam=st.integers(1, 5),
    length=st.integers(1, 6),
    alpha=st.sampled_from([0.0, 0.6]),
    forced=st.sampled_from([None, 5]),
    seed=st.integers(0, 99),
)
def test_the_same_bits_in_numpy_and_under_xla(beam, length, alpha, forced, seed):
    """Many scores are equal where none is normalized, which the libraries round differently."""
    config = BeamConfig(beam, nbest=beam, max_length=length, alpha=alpha)
    rng = np.random.default_rng(seed)
    table = -rng.integers(1, 6, (VOCAB, VOCAB)).astype(np.float32)
    if alpha:
        table -= rng.random(table.shape, np.float32)
    real, most = rng.random(4) < 0.8, rng.integers(1, length + 1, 4).astype(np.int32)

    def search(library):
        return FlatSearch(config, library, table_step(library.xp, table, config), forced)

    mine = search(NUMPY)
    state = SearchState(0, mine.start(real, most), 0)
    while not state.beams.done.all():
        state = mine.advance(state)

    @jax.jit
    def compiled():
        theirs = search(JAX)
        first = SearchState(0, theirs.start(jnp.asarray(real), jnp.asarray(most)), 0)
        final = jax.lax.while_loop(lambda s: ~jnp.all(s.beams.done), theirs.advance, first)
        return theirs.found(final), final.cache

    found, steps = compiled()
    for ours, other in zip(mine.found(state), found, strict=True):
        np.testing.assert_allclose(ours, other, rtol=1e-6 if alpha else 0)
    assert steps == state.cache == state.step <= most[real].max(initial=0)


def test_the_search_on_a_cpu_imports_no_jax():
    script = "import sys, gshard.mt.decoding.host.translator; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
