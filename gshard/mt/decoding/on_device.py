"""Beam search in a loop on the device: `gshard.mt.decoding.search` as one program of XLA.

Dims: B sentences, K beam, T steps, L = K * T slots (or source tokens), V vocabulary, S spans of it,
C tokens of a span, X candidates.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gshard.mt.batching.tokenizer import END, PAD
from gshard.mt.decoding import search as flat
from gshard.nn.strategy import ONE_DEVICE, Strategy
from gshard.nn.transformer import Caches, Transformer

_SPAN = 128  # tokens among which one may be the best


def beam_search(
    model: Transformer,
    source_BL: Array,
    config: flat.BeamConfig,
    strategy: Strategy = ONE_DEVICE,
    forced: Array | None = None,
) -> flat.Translations:
    """Translate sentences of any number and length, each padded with PAD at the end.

    To be called under `jax.jit`, or under `gshard.jit` with the strategy of training: the batch is
    split over the devices, and nothing but the experts' tokens and the test for the end crosses
    between them. A sentence that is all padding costs no steps. Every token gets its experts, so
    that a translation does not depend on the batch and the padding around it. Every translation
    begins with the token `forced`, if it is given.
    """
    source_BL = strategy.groups(source_BL)
    real_BL = source_BL != PAD
    positions_BL = jnp.broadcast_to(jnp.arange(source_BL.shape[1]), source_BL.shape)
    memory_BLM, _ = model.encode(
        source_BL, real_BL.astype(jnp.int32), positions_BL, None, strategy, dropless=True
    )
    B, K, T = len(source_BL), config.beam, config.max_length
    search = flat_search(model, real_BL, config, strategy, forced)
    beams = search.start(jnp.any(real_BL, axis=1), jnp.full(B, T, jnp.int32))
    beams = jax.tree.map(strategy.groups, beams)
    first = flat.SearchState(
        jnp.asarray(0, jnp.int32), beams, model.start_decoding(memory_BLM, K * T)
    )
    final = jax.lax.while_loop(lambda s: ~jnp.all(s.beams.done), search.advance, first)
    return search.found(final)


def flat_search(
    model: Transformer,
    real_BL: Array,
    config: flat.BeamConfig,
    strategy: Strategy = ONE_DEVICE,
    forced: Array | None = None,
) -> flat.FlatSearch:
    """The search by a model, of sentences whose source tokens are `real_BL`."""

    def step(
        t: Array, live: flat.Live, cache: Caches, age_B: Array
    ) -> tuple[flat.Continuations, Caches]:
        logits_BKV, cache = model.decode_step(
            live.tokens,
            jnp.broadcast_to(age_B[:, None], live.tokens.shape),
            cache,
            t % config.max_length * config.beam,
            live.ancestry,
            real_BL,
            strategy,
        )
        return continuations(live, logits_BKV, config), cache

    return flat.FlatSearch(config, JAX, step, forced)


def continuations(
    live: flat.Live, logits_BKV: Array, config: flat.BeamConfig
) -> flat.Continuations:
    """The tokens of the K spans of the vocabulary in which the K best continuations are.

    The vocabulary is read once to find the spans whose own best are the best: instead of all
    scores only theirs are computed and sorted. Spans are sorted by their place, so that the first
    of equal scores is taken, as if all had been sorted.
    """
    logits_BKV = logits_BKV.astype(jnp.float32)
    B, K, V = logits_BKV.shape
    C = _SPAN if V % _SPAN == 0 else 1
    S = V // C
    spans_BKSC = logits_BKV.reshape(B, K, S, C)
    most_BKS = jnp.max(spans_BKSC, axis=3)
    top_BK1 = jnp.max(most_BKS, axis=2, keepdims=True)
    log_z_BK1 = jnp.log(jnp.sum(jnp.exp(logits_BKV - top_BK1), axis=2, keepdims=True))
    known = live.scores[:, :, None], top_BK1, log_z_BK1
    ends_BK = _scores(logits_BKV[:, :, END : END + 1], *known)[:, :, 0]
    silent = np.array([*config.banned, END])
    allowed_SC = jnp.ones((S, C), bool).at[silent // C, silent % C].set(False)
    for s in sorted({token // C for token in silent.tolist()}):
        spoken_BKC = jnp.where(allowed_SC[s], spans_BKSC[:, :, s], -jnp.inf)
        most_BKS = most_BKS.at[:, :, s].set(jnp.max(spoken_BKC, axis=2))
    _, chosen_BK = jax.lax.top_k(_scores(most_BKS, *known).reshape(B, K * S), K)
    chosen_BK = jnp.sort(chosen_BK, axis=1)
    found_BKC = _take(spans_BKSC.reshape(B, K * S, C), chosen_BK)
    theirs = (_take(x, chosen_BK // S) for x in known)
    scores_BKC = jnp.where(allowed_SC[chosen_BK % S], _scores(found_BKC, *theirs), -jnp.inf)
    places_BKC = chosen_BK[:, :, None] * C + jnp.arange(C)
    return flat.Continuations(scores_BKC.reshape(B, -1), places_BKC.reshape(B, -1), ends_BK, V)


def _scores(logits: Array, before: Array, top: Array, log_z: Array) -> Array:
    """What hypotheses are worth with another token, as `jax.nn.log_softmax` has it."""
    return before + (logits - top - log_z)


def _take(x_BX: Array, index_BK: Array) -> Array:
    """Entries of dim 1, by an index of each sentence's own: no device needs another's."""
    index = index_BK.reshape(*index_BK.shape, *(1,) * (x_BX.ndim - 2))
    return jnp.take_along_axis(x_BX, index, axis=1)


JAX = flat.Library(jnp, jax.lax.top_k, _take)
