"""How to search, and what a search finds: for every engine, and without JAX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gshard.mt.batching.tokenizer import END, PAD, START, UNKNOWN

if TYPE_CHECKING:
    from jax import Array

    AnyArray = Array | np.ndarray

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
                f"1 <= nbest <= beam is needed, but nbest={self.nbest}, beam={self.beam}"
            )
        if self.max_length < 1:
            raise ValueError(f"max_length is {self.max_length}; the end alone takes 1")
        if not 0 <= self.alpha <= MOST_ALPHA:  # nor is it nan
            raise ValueError(f"alpha is {self.alpha}; it must be from 0 to {MOST_ALPHA}")
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

    tokens: AnyArray  # [B, N, T]
    scores: AnyArray  # [B, N], length-normalized
    lengths: AnyArray  # [B, N], the end counted
    steps: AnyArray  # how often the decoder ran
