"""Multi-head attention, with key and value sizes of their own.

Keys and values are made apart from attending to them, so that one set of weights serves training
and decoding: training attends to what it just made, decoding to what its cache holds.
Dims: B sequences, T queries, L keys, M model dim, N heads, D key dim, U value dim.
"""

from __future__ import annotations

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from gshard.nn.layers import dropout, init_weight


class KeysValues(NamedTuple):
    """What a query attends to."""

    keys: Array  # [B, L, N, D]
    values: Array  # [B, L, N, U]

    def write(self, new: KeysValues, index: Array) -> KeysValues:
        """Put `new` at position `index` of the buffers."""
        return KeysValues(
            jax.lax.dynamic_update_slice_in_dim(self.keys, new.keys, index, axis=1),
            jax.lax.dynamic_update_slice_in_dim(self.values, new.values, index, axis=1),
        )


class Attention(eqx.Module):
    """Scaled dot-product attention; the softmax is always in float32."""

    wq: Array
    wk: Array
    wv: Array
    wo: Array

    def __init__(
        self, model_dim: int, heads: int, key_dim: int, value_dim: int, dtype: str, key: Array
    ):
        keys = jax.random.split(key, 4)
        self.wq = init_weight(keys[0], (model_dim, heads, key_dim), model_dim, dtype)
        self.wk = init_weight(keys[1], (model_dim, heads, key_dim), model_dim, dtype)
        self.wv = init_weight(keys[2], (model_dim, heads, value_dim), model_dim, dtype)
        self.wo = init_weight(keys[3], (heads, value_dim, model_dim), heads * value_dim, dtype)

    def keys_values(self, x_BLM: Array) -> KeysValues:
        """The keys and values of `x_BLM`."""
        return KeysValues(
            jnp.einsum("BLM,MND->BLND", x_BLM, self.wk.astype(x_BLM.dtype)),
            jnp.einsum("BLM,MNU->BLNU", x_BLM, self.wv.astype(x_BLM.dtype)),
        )

    def __call__(
        self,
        x_BTM: Array,
        memory: KeysValues,
        mask_BTL: Array,
        rate: float = 0.0,
        key: Array | None = None,
    ) -> Array:
        """Attend from `x_BTM` to `memory` where the mask is True, with dropout on the weights.

        A query that may see nothing (padding) gets an even mixture, never a NaN.
        """
        dtype = x_BTM.dtype
        q_BTND = jnp.einsum("BTM,MND->BTND", x_BTM, self.wq.astype(dtype))
        q_BTND = q_BTND * jnp.asarray(q_BTND.shape[-1] ** -0.5, dtype)
        scores_BNTL = jnp.einsum(
            "BTND,BLND->BNTL", q_BTND, memory.keys, preferred_element_type=jnp.float32
        )
        scores_BNTL = jnp.where(mask_BTL[:, None], scores_BNTL, -1e9)
        probs_BNTL = dropout(jax.nn.softmax(scores_BNTL).astype(dtype), rate, key)
        out_BTNU = jnp.einsum("BNTL,BLNU->BTNU", probs_BNTL, memory.values)
        return jnp.einsum("BTNU,NUM->BTM", out_BTNU, self.wo.astype(dtype))


def segment_mask(queries_BT: Array, keys_BL: Array, *, causal: bool = False) -> Array:
    """Who may see whom: tokens of the same segment, and with `causal` none that come later.

    Segment 0 is padding, which nobody sees; packed sequences carry 1, 2, ...
    """
    mask_BTL = (queries_BT[:, :, None] == keys_BL[:, None, :]) & (keys_BL > 0)[:, None, :]
    if causal:
        steps_T, steps_L = jnp.arange(queries_BT.shape[1]), jnp.arange(keys_BL.shape[1])
        mask_BTL = mask_BTL & (steps_T[:, None] >= steps_L[None, :])
    return mask_BTL
