"""The encoder-decoder Transformer of section 2, with experts in every other feed-forward layer.

Layers come in pairs, a dense one and one with experts, and a stack of pairs runs under `lax.scan`:
the program is as long for 36 layers as for 2. Normalization stands before each sublayer, so that
the residual path is untouched from input to output and deep stacks train.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from gshard.nn.attention import Attention, KeysValues, segment_mask
from gshard.nn.experts import Dispatch, MoE
from gshard.nn.gating import PAPER_GATING, GatingConfig, Routed, RouterMetrics, Routing
from gshard.nn.layers import Embedding, FeedForward, LayerNorm, dropout, split_key
from gshard.nn.strategy import ONE_DEVICE, Strategy

Remat = Literal["none", "layer"]


@dataclass(frozen=True)
class TransformerConfig:
    """The dims and settings of a model; `experts=0` is the dense Transformer.

    `groups` is the G of the gating, a property of the model and not of the devices that run it:
    None makes each sequence a group. `remat` trades memory for arithmetic in the backward pass:
    "none", "layer" (keep only what enters each pair of layers), or the bytes that one device has,
    from which `gshard.nn.remat` chooses.
    """

    source_vocab: int
    target_vocab: int
    encoder_layers: int
    decoder_layers: int
    model_dim: int
    hidden_dim: int
    heads: int
    key_dim: int
    value_dim: int
    experts: int = 0
    expert_hidden_dim: int | None = None
    groups: int | None = None
    gating: GatingConfig = PAPER_GATING
    dispatch: Dispatch = "index"
    input_dropout: float = 0.1
    residual_dropout: float = 0.1
    attention_dropout: float = 0.1
    dtype: Literal["float32", "bfloat16"] = "float32"
    weight_dtype: Literal["float32", "bfloat16"] = "float32"
    remat: Remat | int = "none"

    def __post_init__(self) -> None:
        if self.encoder_layers % 2 or self.decoder_layers % 2:
            raise ValueError(
                "layers come in pairs, a dense one and one with experts, but there are "
                f"{self.encoder_layers} encoder and {self.decoder_layers} decoder layers"
            )


class Batch(NamedTuple):
    """Sentence pairs, all [B, L]; segment 0 is padding, packed sentences carry 1, 2, ...

    `inputs` is the target shifted right by one: at each position the model has seen the tokens up
    to `inputs` there and is to say `labels` there.
    """

    source: Array
    source_segments: Array
    source_positions: Array
    inputs: Array
    labels: Array
    target_segments: Array
    target_positions: Array

    @staticmethod
    def of(source: Array, target: Array, *, pad: int = 0, start: int = 0) -> Batch:
        """One sentence pair per row, padded at the end with `pad`; inputs begin with `start`."""
        positions = [jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape) for x in (source, target)]
        shifted = jnp.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=start)
        return Batch(
            source=source,
            source_segments=(source != pad).astype(jnp.int32),
            source_positions=positions[0],
            inputs=shifted,
            labels=target,
            target_segments=(target != pad).astype(jnp.int32),
            target_positions=positions[1],
        )


class LayerCache(NamedTuple):
    """What one decoder layer attends to while decoding."""

    own: KeysValues
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
        self.config = config
        self.self_norm = LayerNorm(c.model_dim, dtype)
        self.self_attention = Attention(*attention, keys[0])
        self.cross_norm = LayerNorm(c.model_dim, dtype) if cross else None
        self.cross_attention = Attention(*attention, keys[1]) if cross else None
        self.feed_forward_norm = LayerNorm(c.model_dim, dtype)
        self.feed_forward, self.moe = None, None
        if sparse and c.experts:
            self.moe = MoE(
                c.experts, c.model_dim, hidden, dtype, keys[2], c.gating, c.groups, c.dispatch
            )
        else:
            self.feed_forward = FeedForward(c.model_dim, hidden, dtype, keys[2])

    def __call__(
        self,
        x_BTM: Array,
        masks: Masks,
        memory_BLM: Array | None = None,
        key: Array | None = None,
        strategy: Strategy = ONE_DEVICE,
        cache: LayerCache | None = None,
        index: Array | int = 0,
        *,
        dropless: bool = False,
    ) -> tuple[Array, LayerCache | None, Routed | None]:
        """One layer; with a `cache` it attends to that, after writing its own part at `index`."""
        c = self.config
        keys = split_key(key, 6)
        h_BTM = self.self_norm(x_BTM)
        own = self.self_attention.keys_values(h_BTM)
        if cache is not None:
            own = cache.own.write(own, jnp.asarray(index))
            cache = LayerCache(own, cache.cross)
        y_BTM = self.self_attention(h_BTM, own, masks.own, c.attention_dropout, keys[0])
        x_BTM = x_BTM + dropout(y_BTM, c.residual_dropout, keys[1])

        if self.cross_attention is not None and self.cross_norm is not None:
            assert masks.cross is not None
            if cache is not None:
                cross = cache.cross
            else:
                assert memory_BLM is not None
                cross = self.cross_attention.keys_values(memory_BLM)
            h_BTM = self.cross_norm(x_BTM)
            y_BTM = self.cross_attention(h_BTM, cross, masks.cross, c.attention_dropout, keys[2])
            x_BTM = x_BTM + dropout(y_BTM, c.residual_dropout, keys[3])

        h_BTM, routed = self.feed_forward_norm(x_BTM), None
        if self.moe is not None:
            y_BTM, routed = self.moe.routed(h_BTM, masks.real, keys[4], strategy, dropless=dropless)
        elif self.feed_forward is not None:
            y_BTM = self.feed_forward(h_BTM)
        return x_BTM + dropout(y_BTM, c.residual_dropout, keys[5]), cache, routed


class Masks(NamedTuple):
    """Which tokens are real, and what each may attend to."""

    real: Array  # [B, T]
    own: Array  # [B, T, L]
    cross: Array | None = None


class Pair(eqx.Module):
    """A dense layer and a layer with experts: the unit that a stack repeats."""

    dense: Layer
    sparse: Layer

    def __init__(self, config: TransformerConfig, key: Array, *, cross: bool):
        key_dense, key_sparse = jax.random.split(key)
        self.dense = Layer(config, key_dense, sparse=False, cross=cross)
        self.sparse = Layer(config, key_sparse, sparse=True, cross=cross)

    def __call__(
        self,
        x_BTM: Array,
        masks: Masks,
        memory_BLM: Array | None = None,
        key: Array | None = None,
        strategy: Strategy = ONE_DEVICE,
        cache: PairCache | None = None,
        index: Array | int = 0,
        *,
        dropless: bool = False,
    ) -> tuple[Array, PairCache | None, Routed | None]:
        """Both layers, and what the one with experts did; `dropless` gives each token its own."""
        keys = split_key(key, 2)
        first, second = cache if cache is not None else (None, None)
        rest = (strategy,)
        x_BTM, first, _ = self.dense(x_BTM, masks, memory_BLM, keys[0], *rest, first, index)
        x_BTM, second, routed = self.sparse(
            x_BTM, masks, memory_BLM, keys[1], *rest, second, index, dropless=dropless
        )
        pair = None if first is None or second is None else PairCache(first, second)
        return x_BTM, pair, routed


class PairCache(NamedTuple):
    """The caches of a pair of decoder layers; stacked over the pairs, the decoder's cache."""

    dense: LayerCache
    sparse: LayerCache


class Transformer(eqx.Module):
    """The whole model. Stacked weights: every array in `encoder` and `decoder` is [pairs, ...]."""

    source: Embedding
    target: Embedding
    encoder: Pair
    decoder: Pair
    encoder_norm: LayerNorm
    decoder_norm: LayerNorm
    config: TransformerConfig = eqx.field(static=True)

    def __init__(self, config: TransformerConfig, key: Array):
        c = config
        keys = jax.random.split(key, 4)

        def stack(pairs: int, key: Array, *, cross: bool) -> Pair:
            return eqx.filter_vmap(lambda k: Pair(c, k, cross=cross))(jax.random.split(key, pairs))

        self.config = config
        self.source = Embedding(c.source_vocab, c.model_dim, c.weight_dtype, keys[0])
        self.target = Embedding(c.target_vocab, c.model_dim, c.weight_dtype, keys[1])
        self.encoder = stack(c.encoder_layers // 2, keys[2], cross=False)
        self.decoder = stack(c.decoder_layers // 2, keys[3], cross=True)
        self.encoder_norm = LayerNorm(c.model_dim, c.weight_dtype)
        self.decoder_norm = LayerNorm(c.model_dim, c.weight_dtype)

    def __call__(
        self,
        batch: Batch,
        key: Array | None = None,
        strategy: Strategy = ONE_DEVICE,
        remat: Remat | None = None,
        *,
        dropless: bool = False,
    ) -> tuple[Array, ModelMetrics]:
        """The logits of every target token, and the routers' metrics; training if there is a key.

        `remat` overrides the config's, whose budget in bytes needs the step's shapes.
        """
        settings = Settings(strategy, remat, dropless)
        x_BTM, encoder, decoder = self._run(batch, key, settings)
        return self.target.logits(x_BTM), ModelMetrics(encoder, decoder)

    def routings(self, batch: Batch, strategy: Strategy = ONE_DEVICE) -> ModelRoutings:
        """Which experts each token of the sentence pairs goes to when nothing is dropped.

        A token's experts then depend on its own sentence alone, and are those that decoding gave
        it, if the pairs are what it found.
        """
        settings = Settings(strategy, dropless=True, report=lambda routed: routed.routing)
        _, encoder, decoder = self._run(batch, None, settings)
        return ModelRoutings(encoder, decoder)

    def encode(
        self,
        source_BL: Array,
        segments_BL: Array,
        positions_BL: Array,
        key: Array | None = None,
        strategy: Strategy = ONE_DEVICE,
        remat: Remat | None = None,
        *,
        dropless: bool = False,
    ) -> tuple[Array, RouterMetrics | None]:
        """What the decoder attends to.

        With `dropless` it depends on nothing but the sentence: no other one in the batch, nor the
        length of its padding, takes or gives a slot.
        """
        settings = Settings(strategy, remat, dropless)
        return self._encode(source_BL, segments_BL, positions_BL, key, settings)

    def start_decoding(self, memory_BLM: Array, length: int) -> PairCache:
        """An empty cache of `length` target positions, with the source's keys and values."""
        c = self.config
        pairs, (B, _, _) = c.decoder_layers // 2, memory_BLM.shape
        own = KeysValues(
            jnp.zeros((pairs, B, length, c.heads, c.key_dim), c.dtype),
            jnp.zeros((pairs, B, length, c.heads, c.value_dim), c.dtype),
        )

        def cross(_: None, pair: Pair) -> tuple[None, list[KeysValues]]:
            attentions = (pair.dense.cross_attention, pair.sparse.cross_attention)
            return None, [a.keys_values(memory_BLM) for a in attentions if a is not None]

        _, (dense, sparse) = jax.lax.scan(cross, None, self.decoder)
        return PairCache(LayerCache(own, dense), LayerCache(own, sparse))

    def decode_step(
        self,
        tokens_BK: Array,
        positions_BK: Array,
        cache: PairCache,
        index: Array | int,
        mask_BKL: Array,
        source_mask_BL: Array,
        strategy: Strategy = ONE_DEVICE,
    ) -> tuple[Array, PairCache]:
        """The logits after `tokens_BK`, K at once, which stand at `index` onwards of the cache.

        `mask_BKL` says which of the cache's positions each token may see, itself included. For
        flat beam search all hypotheses share one buffer, K is the beam, and the mask is the
        ancestry. Nothing is dropped: every token gets its experts.
        """
        x_BKM = self.target(tokens_BK, positions_BK, self.config.dtype)
        source_mask_BKL = jnp.broadcast_to(
            source_mask_BL[:, None, :].astype(bool), (*tokens_BK.shape, source_mask_BL.shape[1])
        )
        real_BK = jnp.ones(tokens_BK.shape, bool)
        masks = Masks(real_BK, mask_BKL.astype(bool), source_mask_BKL)

        def body(x_BKM: Array, layer: tuple[Pair, PairCache]) -> tuple[Array, Any]:
            pair, cached = layer
            pair = strategy.weights(pair)
            x_BKM, cached_now, _ = pair(
                strategy.groups(x_BKM), masks, None, None, strategy, cached, index, dropless=True
            )
            return x_BKM, cached_now

        x_BKM, cache = jax.lax.scan(body, x_BKM, (self.decoder, cache))
        return self.target.logits(self.decoder_norm(x_BKM)), cache

    def _run(self, batch: Batch, key: Array | None, settings: Settings) -> tuple[Array, Any, Any]:
        """Both stacks on given pairs: what the logits are made from, and the routers' reports."""
        keys = split_key(key, 3)
        memory_BLM, encoder = self._encode(*batch[:3], keys[0], settings)
        x_BTM = self.target(batch.inputs, batch.target_positions, self.config.dtype)
        x_BTM = dropout(x_BTM, self.config.input_dropout, keys[1])
        masks = Masks(
            batch.target_segments > 0,
            segment_mask(batch.target_segments, batch.target_segments, causal=True),
            segment_mask(batch.target_segments, batch.source_segments),
        )
        x_BTM, decoder = self._stack(self.decoder, x_BTM, masks, memory_BLM, keys[2], settings)
        return self.decoder_norm(x_BTM), encoder, decoder

    def _encode(
        self,
        source_BL: Array,
        segments_BL: Array,
        positions_BL: Array,
        key: Array | None,
        settings: Settings,
    ) -> tuple[Array, Any]:
        keys = split_key(key, 2)
        x_BLM = self.source(source_BL, positions_BL, self.config.dtype)
        x_BLM = dropout(x_BLM, self.config.input_dropout, keys[0])
        masks = Masks(segments_BL > 0, segment_mask(segments_BL, segments_BL))
        x_BLM, report = self._stack(self.encoder, x_BLM, masks, None, keys[1], settings)
        return self.encoder_norm(x_BLM), report

    def _stack(
        self,
        stack: Pair,
        x_BTM: Array,
        masks: Masks,
        memory_BLM: Array | None,
        key: Array | None,
        settings: Settings,
    ) -> tuple[Array, Any]:
        """Run a stack of pairs; the reports come back with the MoE layers in dim 0."""
        strategy = settings.strategy
        setting = settings.remat or self.config.remat
        if isinstance(setting, int) and key is not None:
            raise ValueError(
                f"remat={setting} is a memory budget: choose_remat turns it into 'none' or 'layer' "
                "for given shapes and devices; train_step does so by itself"
            )
        pairs = jax.tree.leaves(stack)[0].shape[0]
        keys = None if key is None else jax.random.split(key, pairs)

        def body(x_BTM: Array, layer: tuple[Pair, Array | None]) -> tuple[Array, Any]:
            pair, key = layer
            pair = strategy.weights(pair)
            x_BTM, _, routed = pair(
                strategy.groups(x_BTM),
                masks,
                memory_BLM,
                key,
                strategy,
                dropless=settings.dropless,
            )
            return x_BTM, None if routed is None else settings.report(routed)

        run: Callable[..., Any] = body
        if setting == "layer":
            run = jax.checkpoint(body)
        return jax.lax.scan(run, x_BTM, (stack, keys))


class Settings(NamedTuple):
    """How a stack runs, and what is kept of each router: its metrics, or where tokens went."""

    strategy: Strategy = ONE_DEVICE
    remat: Remat | None = None
    dropless: bool = False
    report: Callable[[Routed], Any] = lambda routed: routed.metrics


class ModelMetrics(NamedTuple):
    """The routers' metrics, stacked over the MoE layers of each side; None in a dense model."""

    encoder: RouterMetrics | None
    decoder: RouterMetrics | None


class ModelRoutings(NamedTuple):
    """The routings of each side, every array [MoE layers, K, B, L]; None in a dense model."""

    encoder: Routing | None
    decoder: Routing | None
