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
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gshard.mt.batching.tokenizer import PAD
from gshard.mt.decoding.beam import (
    BeamConfig,
    Ended,
    Live,
    Translations,
    beam_search,
    collect,
    extend,
    is_done,
    may_end,
    read,
    reorder,
    start,
)
from gshard.nn.attention import Buffers
from gshard.nn.strategy import ONE_DEVICE
from gshard.nn.transformer import PairCache, Transformer, TransformerConfig


class Reordered(NamedTuple):
    """What the loop of the reordering search carries."""

    step: Array
    tokens: Array  # [B, K], what each hypothesis reads next
    scores: Array  # [B, K]
    said: Array  # [B, K, T], what each has read
    ended: Ended  # its ancestry holds tokens here
    cache: PairCache  # of B * K sequences
    done: Array  # [B]


def reordering_beam_search(model: Transformer, source_BL: Array, config: BeamConfig):
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
    cache = model.start_decoding(jnp.repeat(memory_BLM, K, axis=0), T)

    def follow(own: Buffers, parent_BK: Array) -> Buffers:
        rows_X = (jnp.arange(B)[:, None] * K + parent_BK).reshape(B * K)
        return jax.tree.map(lambda x: jnp.take(x, rows_X, axis=1), own)

    def step(state: Reordered) -> Reordered:
        t = state.step
        said_BKT = jax.lax.dynamic_update_slice_in_dim(
            state.said, state.tokens[:, :, None], t, axis=2
        )
        logits_X1V, cache = model.decode_step(
            state.tokens.reshape(B * K, 1),
            jnp.broadcast_to(t, (B * K, 1)),
            state.cache,
            t,
            jnp.broadcast_to(jnp.arange(T) <= t, (B * K, 1, T)),
            repeated_XL,
        )
        # The index of each hypothesis stands in for its ancestry: it comes back as the parent.
        own_BK1 = jnp.broadcast_to(jnp.arange(K)[:, None], (B, K, 1))
        live = Live(state.tokens, state.scores, own_BK1)
        ends_BK, extended = extend(live, logits_X1V.reshape(B, K, -1), config)
        ends_BK = jnp.where(may_end(ends_BK, extended.scores, t + 1 == T), ends_BK, -jnp.inf)
        ends_BK = jnp.where(state.done[:, None], -jnp.inf, ends_BK)
        ended = collect(state.ended, live._replace(ancestry=said_BKT), ends_BK, t + 1, config)
        done_B = state.done | is_done(ended, extended, config)
        parent_BK = extended.ancestry[:, :, 0]
        cache = PairCache(*(layer._replace(own=follow(layer.own, parent_BK)) for layer in cache))
        said_BKT = reorder(said_BKT, parent_BK)
        return Reordered(t + 1, extended.tokens, extended.scores, said_BKT, ended, cache, done_B)

    first = start(real_BL, cache, config, ONE_DEVICE)
    said_BKT = jnp.zeros((B, K, T), jnp.int32)
    ended = first.ended._replace(ancestry=said_BKT[:, : config.nbest])
    empty = Reordered(
        first.step, first.live.tokens, first.live.scores, said_BKT, ended, cache, first.done
    )
    final = jax.lax.while_loop(lambda s: (s.step < T) & ~jnp.all(s.done), step, empty)
    N = config.nbest
    one_beam = replace(config, beam=1, nbest=1)
    said_XT = final.ended.ancestry.reshape(B * N, T)
    flat = final.ended._replace(
        ancestry=jnp.ones((B * N, 1, T), bool), lengths=final.ended.lengths.reshape(B * N, 1)
    )
    tokens_BNT = read(said_XT, flat, one_beam).reshape(B, N, T)
    return Translations(tokens_BNT, final.ended.scores, final.ended.lengths, final.step)


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
