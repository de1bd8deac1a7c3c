"""One layer of the Transformer, and the pair of a dense and a sparse one that its stacks repeat."""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from gshard.nn.attention import Attention, Buffers, KeysValues, Segments
from gshard.nn.config import TransformerConfig
from gshard.nn.experts import MoE
from gshard.nn.gating import Routed
from gshard.nn.layers import FeedForward, LayerNorm, dropout, split_key
from gshard.nn.strategy import ONE_DEVICE, Strategy


class LayerCache(NamedTuple):
    """What one decoder layer attends to while decoding."""

    own: Buffers
    cross: KeysValues


class Layer(eqx.Module):
    """Self-attention, in the decoder cross-attention, then feed-forward or experts."""

    self_norm: LayerNorm
    self_attention: Attention
    cross_norm: LayerNorm | None
    cross_attention: Attention | None
    feed_forward_norm: LayerNorm
    feed_forward: FeedForward | None
    moe: MoE | None
    config: TransformerConfig = eqx.field(static=True)

    def __init__(self, config: TransformerConfig, key: Array, *, sparse: bool, cross: bool):
        c, dtype = config, config.weight_dtype
        keys = jax.random.split(key, 3)
        attention = (c.model_dim, c.heads, c.key_dim, c.value_dim, dtype)
        hidden = c.expert_hidden_dim if sparse and c.expert_hidden_dim else c.hidden_dim
        if sparse and cross and c.experts and c.experts_in == "encoder":
            hidden, sparse = c.gating.top_k * hidden + c.shared_hidden_dim, False
        sparse = sparse and c.experts > 0
        dense = c.shared_hidden_dim if sparse else hidden  # beside the experts, or in their place
        dense_key = jax.random.fold_in(keys[2], 1) if sparse else keys[2]
        self.config = config
        self.feed_forward = None
        if dense:
            self.feed_forward = FeedForward(c.model_dim, dense, dtype, dense_key, biases=c.biases)
        self.self_norm = LayerNorm(c.model_dim, dtype)
        self.self_attention = Attention(*attention, keys[0], biases=c.biases)
        self.cross_norm = LayerNorm(c.model_dim, dtype) if cross else None
        self.cross_attention = Attention(*attention, keys[1], biases=c.biases) if cross else None
        self.feed_forward_norm = LayerNorm(c.model_dim, dtype)
        self.moe = None
        if sparse:
            how = (c.dispatch, c.expert_dropout, c.random, c.products, c.exchange)
            settings = (c.gating, c.groups, *how)
            self.moe = MoE(
                c.experts, c.model_dim, hidden, dtype, keys[2], *settings, biases=c.biases
            )

    def __call__(
        self,
        x_BTM: Array,
        around: Inputs,
        key: Array | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[Array, LayerCache | None, Routed | None]:
        """One layer; with a `cache` it attends to that, after writing its own part at `index`."""
        c, (masks, memory_BLM, strategy, index, dropless) = self.config, around
        keys = split_key(key, 6)
        products = c.products if cache is None else "dtype"  # decoding is bound by reading weights

        def attend(attention: Attention, x: Array, memory: Any, visible: Any, key: Any) -> Array:
            rate, random, kind = c.attention_dropout, c.random, c.attention
            return attention(x, memory, visible, rate, key, random, kind, strategy, products)

        def residual(x: Array, y: Array, key: Array | None) -> Array:
            return x + dropout(y, c.residual_dropout, key, c.random)

        kernels = c.kernels(strategy)
        h_BTM, x_BTM = self.self_norm.with_residual(x_BTM, kernels)
        own: Buffers | None = None  # itself
        if cache is not None:
            own = cache.own.write(self.self_attention.keys_values(h_BTM), jnp.asarray(index))
            cache = cache._replace(own=own)
        y_BTM = attend(self.self_attention, h_BTM, own, masks.own, keys[0])
        x_BTM = residual(x_BTM, y_BTM, keys[1])

        if self.cross_attention is not None and self.cross_norm is not None:
            assert masks.cross is not None
            cross = memory_BLM if cache is None else cache.cross
            assert cross is not None
            h_BTM, x_BTM = self.cross_norm.with_residual(x_BTM, kernels)
            y_BTM = attend(self.cross_attention, h_BTM, cross, masks.cross, keys[2])
            x_BTM = residual(x_BTM, y_BTM, keys[3])

        h_BTM, x_BTM = self.feed_forward_norm.with_residual(x_BTM, kernels)
        parts, routed = [], None
        if self.moe is not None:
            y_BTM, routed = self.moe.routed(h_BTM, masks.real, keys[4], strategy, dropless=dropless)
            parts.append(y_BTM)
        if self.feed_forward is not None:
            parts.append(self.feed_forward(h_BTM, products))
        return residual(x_BTM, sum(parts[1:], parts[0]), keys[5]), cache, routed


class Masks(NamedTuple):
    """Which tokens are real, and what each may attend to."""

    real: Array  # [B, T]
    own: Array | Segments  # [B, T, L]
    cross: Array | Segments | None = None


class Inputs(NamedTuple):
    """What each layer of a stack gets: `at` is a place in its cache, `dropless` drops none."""

    masks: Masks
    memory: Array | None = None  # [B, L, M], of the encoder
    strategy: Strategy = ONE_DEVICE
    at: Array | int = 0
    dropless: bool = False


class Pair(eqx.Module):
    """A dense layer and a layer with experts: the unit that a stack repeats."""

    dense: Layer
    sparse: Layer

    def __init__(self, config: TransformerConfig, key: Array, *, cross: bool, sparse: bool = True):
        key_dense, key_sparse = jax.random.split(key)
        self.dense = Layer(config, key_dense, sparse=False, cross=cross)
        self.sparse = Layer(config, key_sparse, sparse=sparse, cross=cross)

    def __call__(
        self, x_BTM: Array, around: Inputs, key: Array | None = None, cache: PairCache | None = None
    ) -> tuple[Array, PairCache | None, Routed | None]:
        """Both layers, and the report of the one with experts."""
        keys = split_key(key, 2)
        first, second = cache if cache is not None else (None, None)
        x_BTM, first, _ = self.dense(x_BTM, around, keys[0], first)
        x_BTM, second, routed = self.sparse(x_BTM, around, keys[1], second)
        pair = None if first is None or second is None else PairCache(first, second)
        return x_BTM, pair, routed


class PairCache(NamedTuple):
    """The caches of a pair of decoder layers; stacked over the pairs, the decoder's cache."""

    dense: LayerCache
    sparse: LayerCache
