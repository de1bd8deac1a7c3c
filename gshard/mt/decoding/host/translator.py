"""A translator on a CPU that compiles nothing: batches of any shape, at once.

Flat beam search is that of `gshard.mt.decoding.search`, with steps outside of XLA: sentences that
are done leave the batch, and a step reads just the slots that are written. Dims: B sentences, K
beam, T steps, L = K * T slots (or source tokens), C candidates, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from gshard.mt.batching.tokenizer import END, PAD, Tokenizer
from gshard.mt.broadcast import Broadcast
from gshard.mt.decoding.host.layers import HIDDEN
from gshard.mt.decoding.host.model import Decoding, HostModel
from gshard.mt.decoding.search import (
    BeamConfig,
    Continuations,
    FlatSearch,
    Library,
    Live,
    SearchState,
    Translations,
)
from gshard.mt.decoding.texts import Routings, SearchJob, TextTranslator, TranslateConfig


class HostTranslator(TextTranslator):
    """A model whose weights are arranged for products on a CPU."""

    def __init__(
        self,
        model: HostModel,
        tokenizer: Tokenizer,
        config: TranslateConfig = TranslateConfig(),  # noqa: B008  (frozen)
        broadcast: Broadcast | None = None,
    ):
        super().__init__(tokenizer, config, model.config, model.weights, broadcast)
        self._model = model

    def search(self, source: np.ndarray, forced: np.ndarray | None = None) -> Translations:
        """The n-best lists of a batch of tokens, padded at the end.

        What a translation may have at most is that of its own source's shape.
        """
        tokens = (source != PAD).sum(axis=1).tolist()
        each = [self.beam(self.config.shape(count)) for count in tokens]
        longest = max(each, key=lambda config: config.max_length)
        most = np.array([config.max_length for config in each])
        return host_search(self._model, source, longest, most, forced)

    def _batches(self, jobs: Sequence[SearchJob]) -> Iterator[list[SearchJob]]:
        """Batches of any shapes: nothing is compiled for one, and fewer batches are faster."""
        ordered = sorted(jobs, key=lambda job: len(job.ids))
        for i in range(0, len(ordered), self.config.rows):
            yield ordered[i : i + self.config.rows]

    def routings(self, source: Sequence[int], output: Sequence[int]) -> Routings:
        """The experts of every token of a sentence and of its translation."""
        return self._model.routings(np.array(source), np.array(output), self.tokenizer.start)

    def to_compile(self) -> list[Callable[[], Any]]:
        """One short search, which prepares the output's product."""
        return [lambda: self.search(np.array([[END]], np.int32))]


_LEAVE = 0.75  # the batch is made smaller when at most this share of it is left


def host_search(
    model: HostModel,
    source_BL: np.ndarray,
    config: BeamConfig,
    max_length_B: np.ndarray | None = None,
    forced: np.ndarray | None = None,
) -> Translations:
    """Translate sentences of any number and length, each padded with PAD at the end.

    `max_length_B` has the largest length of each translation, where they differ; that of `config`
    is then the largest of all. Every translation begins with the token `forced`, if it is given.
    """
    K, V = config.beam, model.config.target_vocab
    silent_V = np.isin(np.arange(V), [*config.banned, END])
    first_K1, C = V * np.arange(K)[:, None], min(V, K + len(config.banned) + 1)

    def step(t: int, live: Live, decoding: Decoding) -> tuple[Continuations, Decoding]:
        hidden_BKL = np.where(live.ancestry[:, :, : (t + 1) * K], np.float32(0), HIDDEN)
        scores_BKC, tokens_BKC, end_BK = model.step(decoding, live.tokens, t, hidden_BKL, C)
        scores_BKC = np.where(silent_V[tokens_BKC], -np.inf, live.scores[:, :, None] + scores_BKC)
        scores_BX, places_BX = (x.reshape(-1, K * C) for x in (scores_BKC, first_K1 + tokens_BKC))
        return Continuations(scores_BX, places_BX, live.scores + end_BK, V), decoding

    search = FlatSearch(config, NUMPY, step, forced)
    real_B = (source_BL != PAD).any(axis=1)
    most_B = np.full(len(real_B), config.max_length) if max_length_B is None else max_length_B
    beams, rows = search.start(real_B, most_B), np.flatnonzero(real_B)
    found = search.found(SearchState(np.zeros((), np.int32), beams, None))  # nothing yet
    if not len(rows):
        return found
    source_BL = source_BL[rows, : int((source_BL != PAD).sum(axis=1).max())]
    state = SearchState(0, _of(rows, beams), model.start(source_BL))
    while len(rows):
        state = search.advance(state)
        left = np.flatnonzero(~state.beams.done)
        if len(left) <= _LEAVE * len(rows):
            done = np.flatnonzero(state.beams.done)
            leaving = search.found(state._replace(beams=_of(done, state.beams)))
            for each, new in zip(found[:3], leaving, strict=False):
                each[rows[done]] = new
            rows, state = rows[left], state._replace(beams=_of(left, state.beams))
            state.cache.keep(left)
    return found._replace(steps=np.asarray(state.step, np.int32))


def _top_k(x_BX: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The largest entries of each row and where they are, as `jax.lax.top_k` finds them."""
    best_BK = np.argsort(-x_BX, axis=1, kind="stable")[:, :count]
    return _take(x_BX, best_BK), best_BK


def _take(x_BX: np.ndarray, index_BK: np.ndarray) -> np.ndarray:
    """Entries of dim 1; `np.take_along_axis` would copy masks bit by bit."""
    return x_BX[np.arange(len(x_BX))[:, None], index_BK]


NUMPY = Library(np, _top_k, _take)


def _of(rows: np.ndarray, beams: Any) -> Any:
    """Only these sentences."""
    if isinstance(beams, np.ndarray):
        return beams[rows]
    return type(beams)(*(_of(rows, each) for each in beams))
