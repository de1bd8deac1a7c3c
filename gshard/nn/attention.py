"""Multi-head attention, with separate key and value sizes.

Keys and values may be computed separately from attention, so that one set of weights serves
training and decoding: decoding attends to its cache.
Dims: B sequences, T queries, L keys, M model dim, N heads, D key dim, U value dim.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from gshard.nn import float8, int8
from gshard.nn.config import AttentionKind, Products, Random
from gshard.nn.flash import Segments, joint_attention, seed_from_row, segment_mask
from gshard.nn.hashing import seed_of
from gshard.nn.kernels.attention import attend_to_cache, cache_reference, fits_cache
from gshard.nn.layers import biased, dropout, init_weight
from gshard.nn.strategy import ONE_DEVICE, Strategy

__all__ = ["Attention", "AttentionKind", "Buffers", "KeysValues", "Segments", "segment_mask"]


class KeysValues(NamedTuple):
    """What a query attends to."""

    keys: Array  # [B, L, N, D]
    values: Array  # [B, L, N, U]


class Buffers(NamedTuple):
    """The cache of keys and values in decoding, heads before positions, as products read them."""

    keys: Array  # [B, N, L, D]
    values: Array  # [B, N, L, U]

    def write(self, new: KeysValues, index: Array) -> Buffers:
        """Put `new` at position `index` of the buffers."""
        written = (
            jax.lax.dynamic_update_slice_in_dim(old, x.swapaxes(1, 2), index, axis=2)
            for old, x in zip(self, new, strict=True)
        )
        return Buffers(*written)


class Attention(eqx.Module):
    """Scaled dot-product attention; the softmax is always in float32."""

    wq: Array
    wk: Array
    wv: Array
    wo: Array
    bq: Array | None
    bk: Array | None
    bv: Array | None
    bo: Array | None

    def __init__(
        self,
        model_dim: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        dtype: str,
        key: Array,
        *,
        biases: bool = False,
    ):
        def bias(*shape: int) -> Array | None:
            return jnp.zeros(shape, dtype) if biases else None

        keys = jax.random.split(key, 4)
        self.bq, self.bk = bias(heads, key_dim), bias(heads, key_dim)
        self.bv, self.bo = bias(heads, value_dim), bias(model_dim)
        self.wq = init_weight(keys[0], (model_dim, heads, key_dim), model_dim, dtype)
        self.wk = init_weight(keys[1], (model_dim, heads, key_dim), model_dim, dtype)
        self.wv = init_weight(keys[2], (model_dim, heads, value_dim), model_dim, dtype)
        self.wo = init_weight(keys[3], (heads, value_dim, model_dim), heads * value_dim, dtype)

    def keys_values(self, x_BLM: Array, products: Products = "dtype") -> KeysValues:
        """The keys and values of `x_BLM`."""
        return KeysValues(
            biased(_product("BTM,MND->BTND", x_BLM, self.wk, products), self.bk),
            biased(_product("BTM,MND->BTND", x_BLM, self.wv, products), self.bv),
        )

    # Traced once for all layers of a shape.
    @functools.partial(jax.jit, static_argnames=("rate", "random", "kind", "strategy", "products"))
    def __call__(
        self,
        x_BTM: Array,
        memory: KeysValues | Buffers | Array | None,
        visible: Array | Segments,
        rate: float = 0.0,
        key: Array | None = None,
        random: Random = "threefry",
        kind: AttentionKind = "plain",
        strategy: Strategy = ONE_DEVICE,
        products: Products = "dtype",
    ) -> Array:
        """Attend from `x_BTM` to `memory` where a query may see it, with dropout on the weights.

        `memory` is keys and values, or the input to compute them from; None is `x_BTM` itself.
        A cache is read without dropout.
        A query that attends to nothing (padding) gets a uniform mixture, never a NaN.
        """
        if isinstance(memory, Buffers):
            assert not isinstance(visible, Segments)
            arrays = (self._queries(x_BTM, products), *memory)
            if kind == "flash" and strategy.devices == 1 and fits_cache(*arrays):
                out_BTNU = attend_to_cache(*arrays, visible)
            else:
                out_BTNU = cache_reference(*arrays, visible)
            return self._project(out_BTNU, products)
        if kind == "flash" and isinstance(visible, Segments) and self.bq is None:
            joint = self._joint(x_BTM, memory, products)
            return self._project(self._flash(joint, visible, rate, key, strategy), products)
        if not isinstance(memory, KeysValues):
            memory = self.keys_values(x_BTM if memory is None else memory, products)
        dtype = x_BTM.dtype
        mask_BTL = visible.mask() if isinstance(visible, Segments) else visible
        q_BTND = self._queries(x_BTM, products)
        scores_BNTL = jnp.einsum(
            "BTND,BLND->BNTL", q_BTND, memory.keys, preferred_element_type=jnp.float32
        )
        scores_BNTL = jnp.where(mask_BTL[:, None], scores_BNTL, -1e9)
        probs_BNTL = dropout(jax.nn.softmax(scores_BNTL).astype(dtype), rate, key, random)
        out_BTNU = jnp.einsum("BNTL,BLNU->BTNU", probs_BNTL, memory.values)
        return self._project(out_BTNU, products)

    def _joint(
        self, x_BTM: Array, memory: KeysValues | Array | None, products: Products
    ) -> tuple[Array, ...]:
        """Queries, keys and values as `joint_attention` takes them: one product for each input.

        One large product is faster than several small ones, forward and backward.
        """

        def product(x_BTM: Array, *weights: Array) -> Array:
            w_MPND = jnp.stack([w.astype(x_BTM.dtype) for w in weights], axis=1)
            return _product("BTM,MPND->BTPND", x_BTM, w_MPND, products)

        if isinstance(memory, KeysValues):
            return product(x_BTM, self.wq), *(jnp.expand_dims(x, 2) for x in memory)
        if self.wk.shape != self.wv.shape:
            source = x_BTM if memory is None else memory
            return product(x_BTM, self.wq), product(source, self.wk), product(source, self.wv)
        if memory is None:
            return (product(x_BTM, self.wq, self.wk, self.wv),)
        return product(x_BTM, self.wq), product(memory, self.wk, self.wv)

    def _flash(
        self,
        arrays: tuple[Array, ...],
        visible: Segments,
        rate: float,
        key: Array | None,
        strategy: Strategy,
    ) -> Array:
        """By the kernel, which each device runs on its own rows in a manual region."""
        rate, seed = (0.0, jnp.zeros(2, jnp.uint32)) if key is None else (rate, seed_of(key))
        B, _, _, N, _ = arrays[0].shape
        own = tuple(strategy.own_groups(x) for x in arrays)
        q_seg, k_seg = (strategy.own_groups(x) for x in (visible.queries, visible.keys))
        if strategy.devices > 1:
            seed = seed_from_row(seed, strategy.own_groups(jnp.arange(B))[0], N)
        out = joint_attention(own, Segments(q_seg, k_seg, visible.causal), rate, seed)
        return strategy.all_groups(out, B)

    def _queries(self, x_BTM: Array, products: Products) -> Array:
        q_BTND = biased(_product("BTM,MND->BTND", x_BTM, self.wq, products), self.bq)
        return q_BTND * jnp.asarray(q_BTND.shape[-1] ** -0.5, x_BTM.dtype)

    def _project(self, out_BTNU: Array, products: Products = "dtype") -> Array:
        return biased(_product("BTNU,NUM->BTM", out_BTNU, self.wo, products), self.bo)


def _product(equation: str, x: Array, w: Array, products: Products) -> Array:
    """The product that contracts the last dims of `x` with the first of `w`."""
    if products != "float8":
        return int8.product(equation, x, w)
    summed = x.ndim - 2
    K = math.prod(w.shape[:summed])
    y_1RN = float8.product(x.reshape(1, -1, K), w.reshape(1, K, -1).astype(x.dtype))
    return y_1RN.reshape(*x.shape[:2], *w.shape[summed:])
