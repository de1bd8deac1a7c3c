"""Flat beam search, the appendix's way to decode: one interleaved sequence for all hypotheses.

The K hypotheses of a sentence share one buffer of K * T slots: slot t * K + k holds the token that
hypothesis k read at step t, and the decoder's keys and values are in the same order. Who descends
from whom is a 0/1 mask over the slots, which is also the mask of self-attention. When hypotheses
branch and die only the masks are reordered; keys and values stay where they were written.

What is searched, in words. A hypothesis is worth the sum of its tokens' log-probabilities. Each
step takes the K best continuations of the K live hypotheses. An end of sentence that ranks among
the K best goes, with its length-normalized score, to a list of its own and is never extended; so
beam 1 is greedy search. At the last step all live hypotheses end. A sentence is done when K
hypotheses have ended, or when no live one can enter the list any more, and the search stops when
every sentence is done.

Dims: B sentences, K beam, N best, T steps, L = K * T slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from gshard.mt.batching.tokenizer import END, PAD
from gshard.mt.decoding.beam_config import BeamConfig, Translations
from gshard.nn.strategy import ONE_DEVICE, Strategy
from gshard.nn.transformer import Caches, Transformer


class Live(NamedTuple):
    """The hypotheses that may still be extended; one that does not exist has score -inf."""

    tokens: Array  # [B, K], what each reads next
    scores: Array  # [B, K]
    ancestry: Array  # [B, K, L]


class Ended(NamedTuple):
    """The best hypotheses that have ended, as masks over the slots; and how many ever did."""

    scores: Array  # [B, N]
    lengths: Array  # [B, N]
    ancestry: Array  # [B, N, L]
    total: Array  # [B]


class State(NamedTuple):
    """What the loop carries; only `live` and `ended` are ever reordered."""

    step: Array
    live: Live
    ended: Ended
    slots: Array  # [B, L], the token in each slot
    cache: Caches
    done: Array  # [B]


def beam_search(
    model: Transformer,
    source_BL: Array,
    config: BeamConfig,
    strategy: Strategy = ONE_DEVICE,
    forced: Array | None = None,
) -> Translations:
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
    K, T = config.beam, config.max_length

    def searching(state: State) -> Array:
        return (state.step < T) & ~jnp.all(state.done)

    def step(state: State) -> State:
        t, live = state.step, state.live
        slots_BL = jax.lax.dynamic_update_slice_in_dim(state.slots, live.tokens, t * K, axis=1)
        itself_KL = jnp.arange(K * T) == t * K + jnp.arange(K)[:, None]
        live = live._replace(ancestry=live.ancestry | itself_KL)
        logits_BKV, cache = model.decode_step(
            live.tokens,
            jnp.broadcast_to(t, live.tokens.shape),
            state.cache,
            t * K,
            live.ancestry,
            real_BL,
            strategy,
        )
        ends_BK, extended = extend(live, logits_BKV, config)
        if forced is not None:
            only = live._replace(tokens=jnp.full_like(live.tokens, forced))
            extended = jax.tree.map(lambda a, b: jnp.where(t == 0, a, b), only, extended)
            ends_BK = jnp.where(t == 0, -jnp.inf, ends_BK)
        ends_BK = jnp.where(may_end(ends_BK, extended.scores, t + 1 == T), ends_BK, -jnp.inf)
        ends_BK = jnp.where(state.done[:, None], -jnp.inf, ends_BK)
        ended = collect(state.ended, live, ends_BK, t + 1, config)
        done_B = state.done | is_done(ended, extended, config)
        return State(t + 1, extended, ended, slots_BL, cache, done_B)

    empty = start(real_BL, model.start_decoding(memory_BLM, K * T), config, strategy)
    final = jax.lax.while_loop(searching, step, empty)
    tokens_BNT = read(final.slots, final.ended, config)
    return Translations(tokens_BNT, final.ended.scores, final.ended.lengths, final.step)


def start(real_BL: Array, cache: Caches, config: BeamConfig, strategy: Strategy) -> State:
    """One live hypothesis per sentence, the empty one, and nothing in any slot."""
    B, K, N, L = real_BL.shape[0], config.beam, config.nbest, config.beam * config.max_length
    first_K = jnp.arange(K) == 0
    return State(
        jnp.asarray(0, jnp.int32),
        Live(
            strategy.groups(jnp.full((B, K), config.start, jnp.int32)),
            strategy.groups(jnp.broadcast_to(jnp.where(first_K, 0.0, -jnp.inf), (B, K))),
            strategy.groups(jnp.zeros((B, K, L), bool)),
        ),
        Ended(
            strategy.groups(jnp.full((B, N), -jnp.inf, jnp.float32)),
            strategy.groups(jnp.zeros((B, N), jnp.int32)),
            strategy.groups(jnp.zeros((B, N, L), bool)),
            strategy.groups(jnp.zeros((B,), jnp.int32)),
        ),
        strategy.groups(jnp.full((B, L), PAD, jnp.int32)),
        cache,
        strategy.groups(~jnp.any(real_BL, axis=1)),
    )


def extend(live: Live, logits_BKV: Array, config: BeamConfig) -> tuple[Array, Live]:
    """The score with which each hypothesis would end here, and the K best that continue."""
    logits_BKV = logits_BKV.astype(jnp.float32)
    V = logits_BKV.shape[2]
    most_BKS = jnp.max(_spans(logits_BKV), axis=3)
    top_BK1 = jnp.max(most_BKS, axis=2, keepdims=True)
    log_z_BK1 = jnp.log(jnp.sum(jnp.exp(logits_BKV - top_BK1), axis=2, keepdims=True))
    known = live.scores[:, :, None], top_BK1, log_z_BK1
    ends_BK = _scores(logits_BKV[:, :, END : END + 1], *known)[:, :, 0]
    scores_BK, best_BK = _best(logits_BKV, most_BKS, known, (*config.banned, END))
    ancestry_BKL = reorder(live.ancestry, best_BK // V)
    return ends_BK, Live((best_BK % V).astype(jnp.int32), scores_BK, ancestry_BKL)


_SPAN = 128  # tokens among which one may be the best


def _spans(logits_BKV: Array) -> Array:
    """The vocabulary in spans of tokens; in spans of one where they do not divide it."""
    B, K, V = logits_BKV.shape
    return logits_BKV.reshape(B, K, -1, _SPAN if V % _SPAN == 0 else 1)


def _scores(logits: Array, before: Array, top: Array, log_z: Array) -> Array:
    """What hypotheses are worth with another token, as `jax.nn.log_softmax` has it."""
    return before + (logits - top - log_z)


def _best(
    logits_BKV: Array, most_BKS: Array, known: tuple[Array, ...], silent: Sequence[int]
) -> tuple[Array, Array]:
    """The K best scores of tokens that are not `silent`, and where they are among all K * V.

    Those K are in the K spans whose own best are the best: the vocabulary is read once to find
    these spans, and instead of all scores only theirs are computed and sorted. Spans are sorted by
    their place, so that of equal scores the first is taken, as if all had been sorted.
    """
    (B, K, V), S = logits_BKV.shape, most_BKS.shape[2]
    C = V // S
    spans_BKSC = _spans(logits_BKV)
    allowed_SC = jnp.ones((S, C), bool).at[jnp.array(silent) // C, jnp.array(silent) % C].set(False)
    for s in sorted({token // C for token in silent}):
        spoken_BKC = jnp.where(allowed_SC[s], spans_BKSC[:, :, s], -jnp.inf)
        most_BKS = most_BKS.at[:, :, s].set(jnp.max(spoken_BKC, axis=2))
    _, chosen_BK = jax.lax.top_k(_scores(most_BKS, *known).reshape(B, K * S), K)
    chosen_BK = jnp.sort(chosen_BK, axis=1)
    found_BKC = reorder(spans_BKSC.reshape(B, K * S, C), chosen_BK)
    theirs = (reorder(x, chosen_BK // S) for x in known)
    scores_BKC = jnp.where(allowed_SC[chosen_BK % S], _scores(found_BKC, *theirs), -jnp.inf)
    scores_BK, best_BK = jax.lax.top_k(scores_BKC.reshape(B, K * C), K)
    places_BK = reorder(chosen_BK, best_BK // C) * C + best_BK % C
    return scores_BK, places_BK


def may_end(ends_BK: Array, goes_on_BK: Array, last: Array) -> Array:
    """Which ends rank among the K best of all candidates; at the last step, all of them.

    Fewer than K candidates are better than such an end, so that those of them that go on are all
    among the K best that go on: there is no need to sort the vocabulary again with the ends in it.
    """
    K = ends_BK.shape[1]
    rivals_BX = jnp.concatenate([goes_on_BK, ends_BK], axis=1)
    better_BK = jnp.sum(rivals_BX[:, None, :] > ends_BK[:, :, None], axis=2)
    return (better_BK < K) | last


def collect(ended: Ended, live: Live, ends_BK: Array, length: Array, config: BeamConfig) -> Ended:
    """Enter the hypotheses that end into the list, which keeps its N best."""
    scores_BX = jnp.concatenate([ended.scores, ends_BK / config.norm(length)], axis=1)
    lengths_BX = jnp.concatenate(
        [ended.lengths, jnp.where(jnp.isfinite(ends_BK), length, 0)], axis=1
    )
    ancestry_BXL = jnp.concatenate([ended.ancestry, live.ancestry], axis=1)
    scores_BN, best_BN = jax.lax.top_k(scores_BX, config.nbest)
    return Ended(
        scores_BN,
        reorder(lengths_BX, best_BN),
        reorder(ancestry_BXL, best_BN),
        ended.total + jnp.sum(jnp.isfinite(ends_BK), axis=1, dtype=jnp.int32),
    )


def is_done(ended: Ended, live: Live, config: BeamConfig) -> Array:
    """Whether K hypotheses have ended, or no live one can still enter the list.

    A sum of log-probabilities only falls, and at best is divided by the norm of the last step.
    """
    bound_B = jnp.max(live.scores, axis=1) / config.norm(config.max_length)
    return (ended.total >= config.beam) | (bound_B <= jnp.min(ended.scores, axis=1))


def reorder(x_BX: Array, index_BK: Array) -> Array:
    """Take entries of dim 1, by an index of each sentence's own."""
    index = index_BK.reshape(*index_BK.shape, *(1,) * (x_BX.ndim - 2))
    return jnp.take_along_axis(x_BX, index, axis=1)


def read(slots_BL: Array, ended: Ended, config: BeamConfig) -> Array:
    """Spell out the ended hypotheses: in each step's slots a hypothesis has one ancestor."""
    B, N, _ = ended.ancestry.shape
    K, T = config.beam, config.max_length
    spoken_BNTK = jnp.where(ended.ancestry, slots_BL[:, None, :], 0).reshape(B, N, T, K)
    inputs_BNT = jnp.sum(spoken_BNTK, axis=3)
    tokens_BNT = jnp.pad(inputs_BNT[:, :, 1:], ((0, 0), (0, 0), (0, 1)))  # without the start
    last_BN1 = ended.lengths[:, :, None] - 1
    position_T = jnp.arange(T)
    tokens_BNT = jnp.where(position_T < last_BN1, tokens_BNT, PAD)
    return jnp.where(position_T == last_BN1, END, tokens_BNT)
