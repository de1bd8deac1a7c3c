"""Flat beam search beside one that reorders its caches, in one run.

    python -m benchmarks.decode                      beams 4 and 8
    python -m benchmarks.decode --beams 2 4 --batch 8 --length 64 --dtype bfloat16

Both search alike, down to the same sequences and scores, which is checked; they differ in where the
keys and values of a hypothesis lie. Times are medians of runs that alternate between the two.
`ms a step` is the time of a search divided by its steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gshard.mt.batching.tokenizer import PAD
from gshard.mt.decoding.on_device import JAX, beam_search, continuations
from gshard.mt.decoding.search import (
    BeamConfig,
    Continuations,
    FlatSearch,
    Live,
    SearchState,
    Translations,
)
from gshard.nn.attention import Buffers
from gshard.nn.transformer import PairCache, Transformer, TransformerConfig


def reordering_beam_search(
    model: Transformer, source_BL: Array, config: BeamConfig
) -> Translations:
    """The usual beam search: each hypothesis is a sequence of the batch with a cache of its own.

    When hypotheses branch, the keys and values of all steps move to their new owners. Those of the
    source are the same for all hypotheses of a sentence: they are repeated once and never move.
    """
    B, K, T = source_BL.shape[0], config.beam, config.max_length
    real_BL = source_BL != PAD
    positions_BL = jnp.broadcast_to(jnp.arange(source_BL.shape[1]), source_BL.shape)
    segments_BL = real_BL.astype(jnp.int32)
    memory_BLM, _ = model.encode(source_BL, segments_BL, positions_BL, dropless=True)
    repeated_XL = jnp.repeat(real_BL, K, axis=0)

    def follow(own: Buffers, parent_BK: Array) -> Buffers:
        rows_X = (jnp.arange(B)[:, None] * K + parent_BK).reshape(B * K)
        return jax.tree.map(lambda x: jnp.take(x, rows_X, axis=1), own)

    def step(t: Array, live: Live, cache: PairCache) -> tuple[Continuations, PairCache]:
        before = (jnp.maximum(t, 1) - 1) * K  # the slots of the parents
        parents_BKK = jax.lax.dynamic_slice_in_dim(live.ancestry, before, K, axis=2)
        parent_BK = jnp.argmax(parents_BKK, axis=2)
        cache = PairCache(*(layer._replace(own=follow(layer.own, parent_BK)) for layer in cache))
        logits_X1V, cache = model.decode_step(
            live.tokens.reshape(B * K, 1),
            jnp.broadcast_to(t, (B * K, 1)),
            cache,
            t,
            jnp.broadcast_to(jnp.arange(T) <= t, (B * K, 1, T)),
            repeated_XL,
        )
        return continuations(live, logits_X1V.reshape(B, K, -1), config), cache

    search = FlatSearch(config, JAX, step)
    beams = search.start(jnp.any(real_BL, axis=1), jnp.full(B, T, jnp.int32))
    cache = model.start_decoding(jnp.repeat(memory_BLM, K, axis=0), T)
    first = SearchState(jnp.asarray(0, jnp.int32), beams, cache)
    final = jax.lax.while_loop(lambda s: ~jnp.all(s.beams.done), search.advance, first)
    return search.found(final)


SEARCHES = {"flat": beam_search, "reordering": reordering_beam_search}


@dataclass(frozen=True)
class Row:
    """One beam: medians of the two searches, and whether they found the same."""

    beam: int
    steps: int
    flat_ms: float
    reordering_ms: float
    won: int  # runs in which flat was faster than the reordering run after it
    same: bool


def measure(model: Transformer, source: Array, config: BeamConfig, runs: int) -> Row:
    compiled, found, times = {}, {}, {}
    for name, search in SEARCHES.items():
        run = jax.jit(lambda m, s, search=search: search(m, s, config))
        compiled[name] = run.lower(model, source).compile()
        found[name] = jax.block_until_ready(compiled[name](model, source))
        times[name] = []
    for _ in range(runs):
        for name, run in compiled.items():
            begin = time.perf_counter()
            jax.block_until_ready(run(model, source))
            times[name].append(time.perf_counter() - begin)
    flat, reordering = found["flat"], found["reordering"]
    steps = int(flat.steps)
    return Row(
        config.beam,
        steps,
        *(1e3 * statistics.median(times[name]) / steps for name in SEARCHES),
        won=sum(f < r for f, r in zip(*times.values(), strict=True)),
        same=bool(jnp.all(flat.tokens == reordering.tokens))
        and bool(jnp.allclose(flat.scores, reordering.scores, rtol=1e-3)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--beams", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64, help="of source and target")
    parser.add_argument("--layers", type=int, default=4, help="of the encoder and the decoder")
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=4000)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()

    dims = TransformerConfig(
        source_vocab=args.vocab,
        target_vocab=args.vocab,
        encoder_layers=args.layers,
        decoder_layers=args.layers,
        model_dim=args.dim,
        hidden_dim=4 * args.dim,
        heads=args.dim // 64,
        key_dim=64,
        value_dim=64,
        experts=args.experts,
        dtype=args.dtype,
        weight_dtype=args.dtype,
    )
    model = jax.jit(Transformer, static_argnums=0)(dims, jax.random.key(0))
    rng = np.random.default_rng(0)
    source = jnp.asarray(rng.integers(4, args.vocab, (args.batch, args.length)), jnp.int32)
    print(
        f"{jax.devices()[0].device_kind}: {args.batch} sentences, {args.length} steps, "
        f"{args.layers} + {args.layers} layers of {args.dim}, {args.experts} experts, {args.dtype}"
    )
    print("beam  steps  flat ms a step  reordering ms a step  faster by  runs won  same")
    for beam in args.beams:
        config = BeamConfig(beam=beam, nbest=beam, max_length=args.length)
        row = measure(model, source, config, args.runs)
        print(
            f"{row.beam:4}  {row.steps:5}  {row.flat_ms:14.2f}  {row.reordering_ms:20.2f}  "
            f"{row.reordering_ms / row.flat_ms:8.2f}x  "
            f"{f'{row.won}/{args.runs}':>8}  {'yes' if row.same else 'NO'}"
        )


if __name__ == "__main__":
    main()
