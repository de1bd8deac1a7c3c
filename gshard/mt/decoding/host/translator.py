"""A translator on a CPU that compiles nothing: batches of any shape, at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from gshard.mt.batching.tokenizer import END, PAD, Tokenizer
from gshard.mt.broadcast import Broadcast
from gshard.mt.decoding.host.model import HostModel
from gshard.mt.decoding.host.search import host_search
from gshard.mt.decoding.search import Translations
from gshard.mt.decoding.texts import Job, Routings, TextTranslator, TranslateConfig


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

    def _batches(self, jobs: Sequence[Job]) -> Iterator[list[Job]]:
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
