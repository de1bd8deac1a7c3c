"""A translator on a CPU that compiles nothing: batches of any shape, at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gshard.mt.batching.tokenizer import END, Tokenizer
from gshard.mt.decoding.beam_config import Translations
from gshard.mt.decoding.host.model import HostModel
from gshard.mt.decoding.host.search import host_search
from gshard.mt.decoding.texts import Routings, TextTranslator, TranslateConfig
from gshard.mt.together import Together


class HostTranslator(TextTranslator):
    """A model whose weights are arranged for products on a CPU."""

    def __init__(
        self,
        model: HostModel,
        tokenizer: Tokenizer,
        config: TranslateConfig = TranslateConfig(),  # noqa: B008  (frozen)
        together: Together | None = None,
    ):
        super().__init__(tokenizer, config, model.config, model.weights, together)
        self._model = model

    def search(self, source: np.ndarray) -> Translations:
        """The n-best lists of a batch of tokens, padded at the end."""
        return host_search(self._model, source, self.config.search(source.shape[1]))

    def routings(self, source: Sequence[int], output: Sequence[int]) -> Routings:
        """The experts of every token of a sentence and of its translation."""
        return self._model.routings(np.array(source), np.array(output))

    def to_compile(self) -> list[Callable[[], Any]]:
        """One short search, which prepares the output's product."""
        return [lambda: self.search(np.array([[END]], np.int32))]
