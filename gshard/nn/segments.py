"""Attention masks of packed sentences. Dims: B rows, T queries, L keys."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Segments:
    """A compact attention mask: tokens attend to tokens of the same segment.

    Segment 0 is padding, to which nothing attends; packed sequences have 1, 2, ...; with `causal`,
    tokens attend only to earlier ones and themselves.
    """

    queries: Array  # [B, T]
    keys: Array  # [B, L]
    causal: bool = field(default=False, metadata={"static": True})

    def mask(self) -> Array:
        """True at [B, T, L] where a query attends to a key."""
        return segment_mask(self.queries, self.keys, causal=self.causal)


def segment_mask(queries_BT: Array, keys_BL: Array, *, causal: bool = False) -> Array:
    """The mask: tokens attend to the same segment, and with `causal` not to later tokens.

    Segment 0 is padding, to which nothing attends; packed sequences have 1, 2, ...
    """
    mask_BTL = (queries_BT[:, :, None] == keys_BL[:, None, :]) & (keys_BL > 0)[:, None, :]
    if causal:
        steps_T, steps_L = jnp.arange(queries_BT.shape[1]), jnp.arange(keys_BL.shape[1])
        mask_BTL = mask_BTL & (steps_T[:, None] >= steps_L[None, :])
    return mask_BTL
