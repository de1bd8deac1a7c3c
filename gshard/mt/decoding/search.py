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

It is written once, in the functions that NumPy and `jax.numpy` share: `decoding.translator` runs it
in a loop that XLA compiles, `decoding.host.translator` in a loop of Python, which imports no JAX.
The two decoders are its steps.

Dims: B sentences, K beam, N best, T steps, L = K * T slots, X candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from gshard.mt.batching.tokenizer import END, PAD, START, UNKNOWN

Array = Any  # NumPy's or JAX's

MOST_ALPHA = 10.0  # the power of a length that float32 holds, with room: more is a mistake


@dataclass(frozen=True)
class BeamConfig:
    """How to search: `beam=1` is greedy, and the `nbest` best of each sentence come back.

    `max_length` counts the end of sentence. `alpha` is that of ((5 + t) / 6)^alpha, by which a
    score is divided: 0 favours short sentences, 1 about means the average per token. A token that
    is `banned` is never chosen, but keeps its share of the probability.
    """

    beam: int = 4
    nbest: int = 1
    max_length: int = 128
    alpha: float = 0.6
    banned: tuple[int, ...] = (PAD, UNKNOWN, START)
    start: int = START  # what the decoder reads first

    def __post_init__(self) -> None:
        if not 1 <= self.nbest <= self.beam:
            raise ValueError(
                f"the {self.nbest} best of a beam of {self.beam} cannot be given; nbest is from 1 "
                "to beam"
            )
        if self.max_length < 1:
            raise ValueError(f"max_length is {self.max_length}; the end alone takes 1")
        if not 0 <= self.alpha <= MOST_ALPHA:  # nor is it nan
            raise ValueError(
                f"alpha is {self.alpha}; it must be from 0 to {MOST_ALPHA:g}, usually 0.6"
            )
        if END in self.banned:
            raise ValueError(f"token {END} ends a sentence and cannot be banned")

    def norm(self, length: Any) -> Any:
        """What the score of `length` tokens is divided by, the end counted."""
        return ((5.0 + length) / 6.0) ** self.alpha


class Translations(NamedTuple):
    """The n-best list of each sentence, best first.

    `tokens` end with END and are padded with PAD. A place that no hypothesis took (and every place
    of a sentence that is all padding) has length 0 and score -inf.
    """

    tokens: Array  # [B, N, T]
    scores: Array  # [B, N], length-normalized
    lengths: Array  # [B, N], the end counted
    steps: Array  # how often the decoder ran


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


class Beams(NamedTuple):
    """All about the sentences, which are dim 0; only `live` and `ended` are ever reordered."""

    live: Live
    ended: Ended
    slots: Array  # [B, T, K], the token in each slot
    born: Array  # [B], the step at which the search of a sentence began
    most: Array  # [B], the largest length of a translation, T at most
    done: Array  # [B]


class SearchState(NamedTuple):
    """What the loop carries."""

    step: Any
    beams: Beams
    cache: Any  # the decoder's


class Continuations(NamedTuple):
    """Continuations of the live hypotheses, the K best among them; and what ending is worth."""

    scores: Array  # [B, X], of hypothesis and token together; -inf for END and what is banned
    places: Array  # [B, X], among all K * V: V times the hypothesis, plus the token
    ends: Array  # [B, K]
    vocab: int  # V


class Library(NamedTuple):
    """NumPy or `jax.numpy`, and what the two do not have alike."""

    xp: Any
    top_k: Callable[[Array, int], tuple[Array, Array]]  # as `jax.lax.top_k`
    take: Callable[[Array, Array], Array]  # entries of dim 1, by an index of each sentence's own


@dataclass(frozen=True)
class FlatSearch:
    """The search with a decoder's step, in arrays of a library.

    `step(t, live, cache, ages)` has the decoder read the live tokens, the `ages`-th of each
    sentence, as those of step t, and gives the candidates and the new cache. Every translation
    begins with the token `forced` (or one for each sentence), if given.
    """

    config: BeamConfig
    library: Library
    step: Callable[[Any, Live, Any, Array], tuple[Continuations, Any]]
    forced: Array | None = None

    def start(self, real_B: Array, most_B: Array) -> Beams:
        """One live hypothesis per sentence that is real, the empty one; nothing in any slot."""
        xp, B, K, N = self.library.xp, len(real_B), self.config.beam, self.config.nbest
        T, L = self.config.max_length, K * self.config.max_length
        first_K = xp.where(xp.arange(K) == 0, xp.float32(0), -xp.inf)
        return Beams(
            Live(
                xp.full((B, K), self.config.start, xp.int32),
                xp.broadcast_to(first_K, (B, K)),
                xp.zeros((B, K, L), bool),
            ),
            Ended(
                xp.full((B, N), -xp.inf, xp.float32),
                xp.zeros((B, N), xp.int32),
                xp.zeros((B, N, L), bool),
                xp.zeros(B, xp.int32),
            ),
            xp.full((B, T, K), PAD, xp.int32),
            xp.zeros(B, xp.int32),
            most_B,
            ~real_B,
        )

    def advance(self, state: SearchState) -> SearchState:
        """One step of all sentences; those that are done stay as they are.

        Steps share T places in turn: a sentence has all of its own until it is done.
        """
        xp, (t, beams, cache) = self.library.xp, state
        K, T = self.config.beam, self.config.max_length
        age_B = t - beams.born
        length_B1, now_T = age_B[:, None] + 1, xp.arange(T) == t % T
        written_BTK = now_T[:, None] & ~beams.done[:, None, None]
        slots_BTK = xp.where(written_BTK, beams.live.tokens[:, None, :], beams.slots)
        itself_KL = xp.arange(K * T) == t % T * K + xp.arange(K)[:, None]
        live = beams.live._replace(ancestry=beams.live.ancestry | itself_KL)
        candidates, cache = self.step(t, live, cache, age_B)
        extended, ends_BK = self.extend(live, candidates), candidates.ends
        if self.forced is not None:  # by the one live hypothesis, whose score stays 0
            first_B1 = length_B1 == 1
            forced_BK = xp.broadcast_to(xp.reshape(self.forced, (-1, 1)), live.tokens.shape)
            only = live._replace(tokens=forced_BK.astype(xp.int32))
            pairs = zip(only, extended, strict=True)
            extended = Live(
                *(xp.where(first_B1.reshape(-1, *(1,) * (a.ndim - 1)), a, b) for a, b in pairs)
            )
            ends_BK = xp.where(first_B1, -xp.inf, ends_BK)
        last_B = age_B + 1 == beams.most
        may_BK = self.may_end(ends_BK, extended.scores) | last_B[:, None]
        ends_BK = xp.where(may_BK & ~beams.done[:, None], ends_BK, -xp.inf)
        ended = self.collect(beams.ended, live, ends_BK, length_B1)
        # Sums of log-probabilities only fall, and are divided by the norm of the last step at best.
        norm_B = self.config.norm(beams.most).astype(xp.float32)
        hopeless_B = extended.scores.max(axis=1) / norm_B <= ended.scores.min(axis=1)
        done_B = beams.done | last_B | (ended.total >= K) | hopeless_B
        after = beams._replace(live=extended, ended=ended, slots=slots_BTK, done=done_B)
        return SearchState(t + 1, after, cache)

    def extend(self, live: Live, candidates: Continuations) -> Live:
        """The K best continuations."""
        xp, top_k, take = self.library
        scores_BK, best_BK = top_k(candidates.scores, self.config.beam)
        places_BK, V = take(candidates.places, best_BK), candidates.vocab
        tokens_BK = (places_BK % V).astype(xp.int32)
        return Live(tokens_BK, scores_BK, take(live.ancestry, places_BK // V))

    def may_end(self, ends_BK: Array, goes_on_BK: Array) -> Array:
        """Which ends rank among the K best of all candidates.

        Fewer than K candidates are better than such an end, so that the ones that go on are
        all among the K best that go on: there is no need to sort all candidates with the ends.
        """
        rivals_BX = self.library.xp.concatenate([goes_on_BK, ends_BK], axis=1)
        better_BK = (rivals_BX[:, None, :] > ends_BK[:, :, None]).sum(axis=2)
        return better_BK < self.config.beam

    def collect(self, ended: Ended, live: Live, ends_BK: Array, length_B1: Array) -> Ended:
        """Enter the hypotheses that end into the list, which keeps its N best."""
        xp, top_k, take = self.library
        ends, norm_B1 = xp.isfinite(ends_BK), self.config.norm(length_B1).astype(xp.float32)
        new = ends_BK / norm_B1, xp.where(ends, length_B1, 0).astype(xp.int32), live.ancestry
        pairs = zip(ended[:3], new, strict=True)
        scores_BX, lengths_BX, ancestry_BXL = (xp.concatenate(pair, axis=1) for pair in pairs)
        scores_BN, best_BN = top_k(scores_BX, self.config.nbest)
        total_B = ended.total + ends.sum(axis=1, dtype=xp.int32)
        return Ended(scores_BN, take(lengths_BX, best_BN), take(ancestry_BXL, best_BN), total_B)

    def found(self, state: SearchState) -> Translations:
        """Spell out the ended hypotheses: in each step's slots a hypothesis has one ancestor."""
        xp, ended, slots_BTK = self.library.xp, state.beams.ended, state.beams.slots
        (B, N, _), (_, T, K) = ended.ancestry.shape, slots_BTK.shape
        read_BNTK = xp.where(ended.ancestry.reshape(B, N, T, K), slots_BTK[:, None], 0)
        place_BT = (state.beams.born[:, None] + xp.arange(T)) % T  # of each token of a sentence
        read_BTN = read_BNTK.sum(axis=3, dtype=xp.int32).swapaxes(1, 2)
        read_BNT = self.library.take(read_BTN, place_BT).swapaxes(1, 2)
        said_BNT = xp.pad(read_BNT[:, :, 1:], ((0, 0), (0, 0), (0, 1)))  # without the start
        last_BN1, position_T = ended.lengths[:, :, None] - 1, xp.arange(T)
        said_BNT = xp.where(position_T < last_BN1, said_BNT, PAD)
        tokens_BNT = xp.where(position_T == last_BN1, END, said_BNT)
        return Translations(tokens_BNT, ended.scores, ended.lengths, state.step)
