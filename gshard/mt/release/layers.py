"""What layouts of other tools have in common: the layers one by one, and what none of them has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from gshard.nn.config import TransformerConfig


def layers_of(pairs: Any, stacked: bool) -> Iterator[Any]:
    """The layers of a stack, in order."""
    if stacked:
        count = len(jax.tree.leaves(pairs)[0])
        pairs = [jax.tree.map(lambda leaf, n=n: leaf[n], pairs) for n in range(count)]
    for pair in pairs:
        yield from (pair.dense, pair.sparse)


def inexpressible(config: TransformerConfig) -> str:
    """Why a model has no form in other tools' layouts, or ""."""
    c = config
    if not c.heads * c.key_dim == c.heads * c.value_dim == c.model_dim:
        return (
            f"its heads have {c.key_dim} and {c.value_dim} numbers for keys and values, and the "
            f"layout has model_dim / heads = {c.model_dim} / {c.heads} for both"
        )
    if c.model_dim % 2:
        return f"its model_dim of {c.model_dim} is odd"
    if c.experts and c.gating.top_k != 2:
        return f"its tokens go to {c.gating.top_k} expert, and the layout's to 2"
    if c.experts and c.shared_hidden_dim:
        return "it has a feed-forward network beside its experts (model.shared_hidden_dim)"
    return ""
