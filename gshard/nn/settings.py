"""The settings of layers, without JAX: configurations are read where nothing is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AttentionKind = Literal["plain", "flash"]
Dispatch = Literal["einsum", "index", "flat"]
Exchange = Literal["dtype", "float8"]
Products = Literal["dtype", "float8"]
Random = Literal["threefry", "hash"]

EPSILON = 1e-6  # added to the variance by layer normalization


@dataclass(frozen=True)
class GatingConfig:
    """The settings of a router.

    `aux_coefficient` is the k of L = l_nll + k * l_aux, with l_aux in the scaled form of
    `RouterMetrics.aux_loss`: the paper's own form needs a k that is E * E times larger.
    `second_expert` says when the second choice is taken: with probability 2 * g2 (`random`, the
    paper's), always (`all`), or drawn from the gates without the first one (`sampling`).
    `output_masking` is the share of the experts' results that training masks, independently for
    each choice of each token (NLLB's "expert output masking"; the paper has none).
    """

    top_k: Literal[1, 2] = 2
    capacity_factor: float = 2.0
    eval_capacity_factor: float = 2.0
    min_capacity: int = 1
    second_expert: Literal["random", "all", "sampling"] = "random"
    aux_coefficient: float = 0.01
    z_coefficient: float = 0.0
    output_masking: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.output_masking < 1:
            raise ValueError(f"output_masking is {self.output_masking}; it is in [0, 1)")

    def capacity(self, tokens: int, experts: int, *, train: bool, dropless: bool = False) -> int:
        """C, the slots each expert has for one group of `tokens`: floor(S * factor / E).

        A token chooses an expert at most once, so C = S drops nothing: that is `dropless`, and
        also the largest useful capacity.
        """
        if dropless:
            return tokens
        factor = self.capacity_factor if train else self.eval_capacity_factor
        return min(tokens, max(int(tokens * factor / experts), self.min_capacity))


PAPER_GATING = GatingConfig()
