"""Flat beam search on a CPU: what `gshard.mt.decoding.beam` searches, with steps outside of XLA.

The layout is the same: slot t * K + k holds what hypothesis k read at step t, and only masks are
reordered. Here sentences that are done leave the batch, and a step reads just the slots that are
written. Dims: B sentences, K beam, N best, T steps, L = K * T slots, C candidates.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gshard.mt.batching.tokenizer import END, PAD
from gshard.mt.decoding.beam_config import BeamConfig, Translations
from gshard.mt.decoding.host.layers import HIDDEN
from gshard.mt.decoding.host.model import Candidates, HostModel

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
    B, N, T = len(source_BL), config.nbest, config.max_length
    found = Translations(
        np.full((B, N, T), PAD, np.int32),
        np.full((B, N), -np.inf, np.float32),
        np.zeros((B, N), np.int32),
        np.zeros((), np.int32),
    )
    real_B = (source_BL != PAD).any(axis=1)
    rows = np.flatnonzero(real_B)
    if not len(rows):
        return found
    source_BL = source_BL[rows, : int((source_BL != PAD).sum(axis=1).max())]
    most_B = np.full(B, T) if max_length_B is None else max_length_B
    beams = _Beams(rows, config, most_B[rows], model.config.target_vocab)
    decoding = model.start(source_BL)
    for t in range(T):
        hidden_BKL = beams.read(t)
        C = min(model.config.target_vocab, config.beam + len(config.banned) + 1)
        candidates = model.step(decoding, beams.tokens, t, hidden_BKL, C)
        if t == 0 and forced is not None:
            beams.tokens[:] = forced  # of the one live hypothesis, whose score stays 0
            continue
        beams.extend(candidates, t + 1)
        left = np.flatnonzero(~beams.done)
        if not len(left) or t + 1 == T:
            beams.write(found, np.arange(len(beams.rows)))
            return found._replace(steps=np.asarray(t + 1, np.int32))
        if len(left) <= _LEAVE * len(beams.rows):
            beams.write(found, np.flatnonzero(beams.done))
            beams.keep(left)
            decoding.keep(left)
    raise AssertionError("the last step returns")


class _Beams:
    """The hypotheses of the sentences in the batch."""

    _PER_SENTENCE = (
        "rows", "most", "done", "tokens", "scores", "ancestry", "slots",
        "ended_scores", "ended_lengths", "ended_ancestry", "total",
    )  # fmt: skip

    def __init__(self, rows: np.ndarray, config: BeamConfig, most: np.ndarray, vocab: int):
        B, K, N, L = len(rows), config.beam, config.nbest, config.beam * config.max_length
        self.config = config
        self.rows = rows  # of the caller's batch
        self.most = most  # tokens of a translation
        self._silent_V = np.zeros(vocab, bool)  # what no hypothesis continues with
        self._silent_V[[token for token in (*config.banned, END) if token < vocab]] = True
        self.done = np.zeros(B, bool)
        self.tokens = np.full((B, K), config.start, np.int64)
        self.scores = np.tile(np.where(np.arange(K) == 0, 0.0, -np.inf).astype(np.float32), (B, 1))
        self.ancestry = np.zeros((B, K, L), bool)
        self.slots = np.full((B, L), PAD, np.int32)
        self.ended_scores = np.full((B, N), -np.inf, np.float32)
        self.ended_lengths = np.zeros((B, N), np.int32)
        self.ended_ancestry = np.zeros((B, N, L), bool)
        self.total = np.zeros(B, np.int32)

    def read(self, t: int) -> np.ndarray:
        """Write the live tokens into the slots of step t: what each may see of those until now."""
        K = self.config.beam
        self.slots[:, t * K : (t + 1) * K] = self.tokens
        self.ancestry[:, np.arange(K), t * K + np.arange(K)] = True
        return np.where(self.ancestry[:, :, : (t + 1) * K], np.float32(0), HIDDEN)

    def extend(self, candidates: Candidates, length: int) -> None:
        """Take the K best continuations, and enter those that end into the list."""
        config, K = self.config, self.config.beam
        B, _, C = candidates.tokens.shape
        scores_BKC = self.scores[:, :, None] + candidates.scores
        scores_BKC[self._silent_V[candidates.tokens]] = -np.inf
        scores_BX = scores_BKC.reshape(B, K * C)
        best_BK = np.argsort(-scores_BX, axis=1, kind="stable")[:, :K]
        ends_BK = self.scores + candidates.end
        self.scores = _taken(scores_BX, best_BK)
        self._collect(self._that_end(ends_BK, length), length)
        self.tokens = _taken(candidates.tokens.reshape(B, K * C), best_BK)
        self.ancestry = _taken(self.ancestry, best_BK // C)
        bound_B = self.scores.max(axis=1) / norm(config, self.most)
        self.done |= (self.total >= K) | (bound_B <= self.ended_scores.min(axis=1))
        self.done |= length == self.most

    def _that_end(self, ends_BK: np.ndarray, length: int) -> np.ndarray:
        """The scores of ends that rank among the K best of all; at the last step, of all ends."""
        rivals_BX = np.concatenate([self.scores, ends_BK], axis=1)
        better_BK = (rivals_BX[:, None, :] > ends_BK[:, :, None]).sum(axis=2)
        may = (better_BK < self.config.beam) | (length == self.most[:, None])
        return np.where(may & ~self.done[:, None], ends_BK, -np.inf).astype(np.float32)

    def _collect(self, ends_BK: np.ndarray, length: int) -> None:
        ends = np.isfinite(ends_BK)
        if not ends.any():
            return
        normed_BK = ends_BK / norm(self.config, length)
        scores_BX = np.concatenate([self.ended_scores, normed_BK], axis=1)
        lengths_BX = np.concatenate([self.ended_lengths, np.where(ends, length, 0)], axis=1)
        ancestry_BXL = np.concatenate([self.ended_ancestry, self.ancestry], axis=1)
        best_BN = np.argsort(-scores_BX, axis=1, kind="stable")[:, : self.config.nbest]
        self.ended_scores = _taken(scores_BX, best_BN)
        self.ended_lengths = _taken(lengths_BX, best_BN)
        self.ended_ancestry = _taken(ancestry_BXL, best_BN)
        self.total += ends.sum(axis=1, dtype=np.int32)

    def write(self, found: Translations, which: np.ndarray) -> None:
        """Spell out the ended hypotheses of some sentences: in each step one slot is theirs."""
        K, T = self.config.beam, self.config.max_length
        for b in which:
            into = self.rows[b]
            found.scores[into] = self.ended_scores[b]
            found.lengths[into] = self.ended_lengths[b]
            for n, length in enumerate(self.ended_lengths[b]):
                if length:
                    own = np.where(self.ended_ancestry[b, n], self.slots[b], 0).reshape(T, K)
                    found.tokens[into, n, : length - 1] = own.sum(axis=1)[1:length]
                    found.tokens[into, n, length - 1] = END

    def keep(self, left: np.ndarray) -> None:
        """Only these sentences."""
        for name in self._PER_SENTENCE:
            setattr(self, name, getattr(self, name)[left])


def norm(config: BeamConfig, length: Any) -> Any:
    """What the score of `length` tokens is divided by, in NumPy; of a number or an array."""
    return np.float32(((5.0 + length) / 6.0) ** config.alpha)


def _taken(x_BX: np.ndarray, index_BK: np.ndarray) -> np.ndarray:
    """Entries of dim 1, by an index of each sentence's own."""
    return x_BX[np.arange(len(x_BX))[:, None], index_BK]
