"""The encoder-decoder Transformer of section 2, with experts in every other feed-forward layer.

Layers come in pairs, a dense one and one with experts, and a stack of pairs runs under `lax.scan`:
the program is as long for 36 layers as for 2. `config.stacked=False` writes the pairs out instead.
With stages a stack is a pipeline: `gshard.pipeline` in the place of `lax.scan`.
Normalization is before each sublayer (pre-LN), so that the residual path is the identity from input
to output and deep stacks train.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from gshard.nn.attention import Buffers, Segments
from gshard.nn.config import Batch, Remat, TransformerConfig
from gshard.nn.gating import Routed, RouterMetrics, Routing
from gshard.nn.hashing import hash_key
from gshard.nn.layers import Embedding, LayerNorm, dropout, split_key
from gshard.nn.pair import Inputs, LayerCache, Masks, Pair, PairCache
from gshard.nn.strategy import ONE_DEVICE, Strategy
from gshard.pipelining.api import pipeline

Pairs = Pair | tuple[Pair, ...]  # stacked, every array [pairs, ...]; or each by itself
Caches = PairCache | tuple[PairCache, ...]


class Transformer(eqx.Module):
    """The entire model: two stacks of pairs."""

    source: Embedding
    target: Embedding
    encoder: Pairs
    decoder: Pairs
    encoder_norm: LayerNorm
    decoder_norm: LayerNorm
    config: TransformerConfig = eqx.field(static=True)

    def __init__(self, config: TransformerConfig, key: Array):
        c = config
        keys = jax.random.split(key, 4)

        def stack(pairs: int, key: Array, *, cross: bool) -> Pairs:
            keys = jax.random.split(key, pairs)
            if c.stacked:
                return eqx.filter_vmap(lambda k: Pair(c, k, cross=cross))(keys)
            every = c.experts_every // 2  # pairs
            return tuple(
                Pair(c, k, cross=cross, sparse=n % every == every - 1) for n, k in enumerate(keys)
            )

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
        x_BTM, metrics = self.hidden(batch, key, strategy, remat, dropless=dropless)
        return self.target.logits(x_BTM), metrics

    def hidden(
        self,
        batch: Batch,
        key: Array | None = None,
        strategy: Strategy = ONE_DEVICE,
        remat: Remat | None = None,
        *,
        dropless: bool = False,
    ) -> tuple[Array, ModelMetrics]:
        """The decoder's last hidden values, and the routers' metrics."""
        x_BTM, encoder, decoder = self._run(batch, key, StackSettings(strategy, remat, dropless))
        return x_BTM, ModelMetrics(encoder, decoder)

    def routings(self, batch: Batch, strategy: Strategy = ONE_DEVICE) -> ModelRoutings:
        """Which experts each token of the sentence pairs goes to when nothing is dropped.

        A token's experts then depend on its own sentence alone, and are those of decoding, if the
        pairs are its results.
        """
        settings = StackSettings(strategy, dropless=True, report=lambda routed: routed.routing)
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

        With `dropless` it depends on the sentence alone, not on the rest of the batch or on
        padding.
        """
        source = (source_BL, segments_BL, positions_BL)
        return self._encode(source, key, StackSettings(strategy, remat, dropless))

    def start_decoding(self, memory_BLM: Array, length: int) -> Caches:
        """An empty cache of `length` target positions, with the source's keys and values."""
        c = self.config
        B = memory_BLM.shape[0]

        def empty(dim: int) -> Array:
            return jnp.zeros((B, c.heads, length, dim), c.dtype)

        def start(pair: Pair) -> PairCache:
            caches = []
            for layer in (pair.dense, pair.sparse):
                assert layer.cross_attention is not None
                own = Buffers(empty(c.key_dim), empty(c.value_dim))
                caches.append(LayerCache(own, layer.cross_attention.keys_values(memory_BLM)))
            return PairCache(*caches)

        return _over_pairs(lambda _, pair: (None, start(pair)), None, self.decoder)[1]

    def enter(self, cache: Caches, memory_RLM: Array, row_R: Array) -> Caches:
        """The cache with other sources in some rows; a row past the end is left out."""

        def put(old: Array, new: Array) -> Array:
            return old.at[self._rows(row_R)].set(new, mode="drop")

        def enter(old: LayerCache, new: LayerCache) -> LayerCache:
            return old._replace(cross=jax.tree.map(put, old.cross, new.cross))

        fresh = self.start_decoding(memory_RLM, 0)
        return jax.tree.map(enter, cache, fresh, is_leaf=lambda x: isinstance(x, LayerCache))

    def cache_rows(self, cache: Caches, row_R: Array) -> Caches:
        """The cache of some rows alone, or of rows again."""
        return jax.tree.map(lambda x: x.at[self._rows(row_R)].get(mode="clip"), cache)

    def _rows(self, row_R: Array) -> Any:
        """An index of rows in the arrays of the decoder's cache."""
        return (slice(None), row_R) if isinstance(self.decoder, Pair) else row_R

    def decode_step(
        self,
        tokens_BK: Array,
        positions_BK: Array,
        cache: Caches,
        index: Array | int,
        mask_BKL: Array,
        source_mask_BL: Array,
        strategy: Strategy = ONE_DEVICE,
    ) -> tuple[Array, Caches]:
        """The logits after `tokens_BK`, K at once, which are at `index` and later in the cache.

        `mask_BKL` says which of the cache's positions each token may see, itself included. For
        flat beam search all hypotheses share one buffer, K is the beam, and the mask is the
        ancestry. Nothing is dropped: every token gets its experts.
        """
        x_BKM = self.target(tokens_BK, self._positions(positions_BK), self.config.dtype)
        source_mask_BKL = jnp.broadcast_to(
            source_mask_BL[:, None, :].astype(bool), (*tokens_BK.shape, source_mask_BL.shape[1])
        )
        real_BK = jnp.ones(tokens_BK.shape, bool)
        masks = Masks(real_BK, mask_BKL.astype(bool), source_mask_BKL)
        around = Inputs(masks, None, strategy, index, dropless=True)

        def body(x_BKM: Array, pair: Pair, cached: PairCache) -> tuple[Array, Any]:
            x_BKM, cached_now, _ = strategy.weights(pair)(
                strategy.groups(x_BKM), around, cache=cached
            )
            return x_BKM, cached_now

        x_BKM, cache = _over_pairs(body, x_BKM, self.decoder, cache)
        return self.target.logits(self.decoder_norm(x_BKM)), cache

    def _run(
        self, batch: Batch, key: Array | None, settings: StackSettings
    ) -> tuple[Array, Any, Any]:
        """Both stacks on given pairs: the last hidden values, and the routers' reports."""
        keys = self._keys(key, 3)
        memory_BLM, encoder = self._encode(batch[:3], keys[0], settings)
        positions_BT = self._positions(batch.target_positions)
        x_BTM = self.target(batch.inputs, positions_BT, self.config.dtype)
        x_BTM = self._input_dropout(x_BTM, keys[1])
        target, source = batch.target_segments, batch.source_segments
        masks = Masks(target > 0, Segments(target, target, causal=True), Segments(target, source))
        x_BTM, decoder = self._stack(self.decoder, x_BTM, masks, memory_BLM, keys[2], settings)
        return self.decoder_norm(x_BTM), encoder, decoder

    def _encode(
        self, source: Sequence[Array], key: Array | None, settings: StackSettings
    ) -> tuple[Array, Any]:
        keys, (source_BL, segments_BL, positions_BL) = self._keys(key, 2), source
        x_BLM = self.source(source_BL, self._positions(positions_BL), self.config.dtype)
        x_BLM = self._input_dropout(x_BLM, keys[0])
        masks = Masks(segments_BL > 0, Segments(segments_BL, segments_BL))
        x_BLM, report = self._stack(self.encoder, x_BLM, masks, None, keys[1], settings)
        return self.encoder_norm(x_BLM), report

    def _positions(self, positions: Array) -> Array:
        first = self.config.first_position
        return positions + first if first else positions

    def _keys(self, key: Array | None, count: int) -> list[Array | None]:
        if key is not None and self.config.random == "hash":
            key = hash_key(key)
        return split_key(key, count)

    def _input_dropout(self, x_BLM: Array, key: Array | None) -> Array:
        return dropout(x_BLM, self.config.input_dropout, key, self.config.random)

    def _stack(
        self,
        stack: Pairs,
        x_BTM: Array,
        masks: Masks,
        memory_BLM: Array | None,
        key: Array | None,
        settings: StackSettings,
    ) -> tuple[Array, Any]:
        """Run a stack of pairs; the reports come back with the MoE layers in dim 0."""
        strategy = settings.strategy.inside
        setting = settings.remat or self.config.remat
        if isinstance(setting, int) and key is not None:
            raise ValueError(
                f"remat={setting} is a memory budget: choose_remat turns it into 'none' or 'layer' "
                "for a step and its devices, and train_step(..., remat=...) takes that"
            )
        keys: Any = None if key is None else jax.random.split(key, _count(stack))

        def body(
            x_BTM: Array, pair: Pair, key: Array | None, masks: Masks, memory_BLM: Array | None
        ) -> tuple[Array, Any]:
            around = Inputs(masks, memory_BLM, strategy, dropless=settings.dropless)
            x_BTM, _, routed = strategy.weights(pair)(strategy.groups(x_BTM), around, key)
            return x_BTM, None if routed is None else settings.report(routed)

        if settings.strategy.stages > 1:
            remat = setting == "layer"
            rest = (masks, memory_BLM)
            return in_stages(body, stack, keys, x_BTM, rest, settings.strategy, remat=remat)

        def run(x_BTM: Array, pair: Pair, key: Array | None) -> tuple[Array, Any]:
            return body(x_BTM, pair, key, masks, memory_BLM)

        if setting == "layer":
            run = jax.checkpoint(run)
        if isinstance(stack, Pair):
            return _over_pairs(run, x_BTM, stack, keys)
        x_BTM, reports = _over_pairs(
            run, x_BTM, stack, [None] * len(stack) if keys is None else keys
        )
        reports = [report for report in reports if report is not None]
        return x_BTM, jax.tree.map(lambda *each: jnp.stack(each), *reports) if reports else None


def _count(stack: Pairs) -> int:
    """How many pairs there are."""
    return len(jax.tree.leaves(stack)[0]) if isinstance(stack, Pair) else len(stack)


def _over_pairs(body: Callable[..., Any], carry: Any, stack: Pairs, *each: Any) -> Any:
    """Run `body(carry, pair, ...)` over the pairs: under `lax.scan`, or one after another.

    What it returns beside the carry comes back stacked, or as a tuple.
    """
    if isinstance(stack, Pair):
        return jax.lax.scan(lambda carry, xs: body(carry, *xs), carry, (stack, *each))
    results, run = [], jax.jit(body)  # traced once, as under `lax.scan`
    for xs in zip(stack, *each, strict=True):
        carry, result = run(carry, *xs)
        results.append(result)
    return carry, tuple(results)


class StackSettings(NamedTuple):
    """How a stack runs, and what it returns for each router: metrics or routings."""

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


def in_stages(
    body: Callable[..., tuple[Array, Any]],
    stack: Any,
    keys: Array | None,
    x_BTM: Array,
    rest: Any,
    strategy: Strategy,
    *,
    remat: bool,
) -> tuple[Array, Any]:
    """`body(x, pair, key, *rest)` over the pairs in stages: the results, and reports by pair.

    `rest` has rows as `x_BTM` does, which travel with it. A group of tokens stays in one
    microbatch. Reports are means over the microbatches, and what is random is drawn for each.
    """
    count, B, groups = strategy.microbatches, len(x_BTM), _groups(stack)
    if not isinstance(stack, Pair):
        raise ValueError(f"{strategy.stages} stages need stacked=True, the weights of all pairs")
    if B % count or (groups or count) % count:
        raise ValueError(
            f"{B} sequences in {groups or B} groups do not divide into {count} microbatches"
        )
    pairs, together = len(jax.tree.leaves(stack)[0]), max(B // (groups or B), 1)

    def ordered(a: Array, sizes: tuple[int, int]) -> Array:
        """Rows such that every `count`-th is of one microbatch: groups there; or back."""
        return a.reshape(-1, *sizes, *a.shape[1:]).swapaxes(1, 2).reshape(a.shape)

    def one(weights: Any, values: Any) -> Any:
        (pair, key, number), (x, rows, rest, reports) = weights, values
        key = None if key is None else jax.random.fold_in(key, rows[0])
        x, report = body(x, pair, key, *rest)
        here = jnp.arange(pairs) == number
        reports = jax.tree.map(
            lambda kept, new: jnp.where(here.reshape(-1, *[1] * new.ndim), new, kept),
            reports,
            report,
        )
        return x, rows, rest, reports

    weights = (stack, keys, jnp.arange(pairs))
    batch = jax.tree.map(lambda a: ordered(a, (count, together)), (x_BTM, jnp.arange(B), rest))
    first = jax.tree.map(lambda a: a[0], (stack, keys))
    of_part = jax.tree.map(lambda a: a[: B // count], (batch[0], batch[2]))
    report = jax.eval_shape(lambda w, v: body(v[0], *w, *v[1])[1], first, of_part)
    empty = jax.tree.map(lambda a: jnp.zeros((B, pairs, *a.shape), a.dtype), report)
    run = jax.checkpoint(one) if remat else one
    x_BTM, _, _, reports = pipeline(
        run, weights, (*batch, empty), stages=strategy.stages, microbatches=count
    )
    return ordered(x_BTM, (together, count)), jax.tree.map(lambda a: jnp.mean(a, 0), reports)


def _groups(stack: Any) -> int | None:
    """The groups of the batch, in a stack that has experts."""
    moe = getattr(getattr(stack, "sparse", None), "moe", None)
    return moe and moe.groups
