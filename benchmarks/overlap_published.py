"""What others published of communication beside products, and what the forecast says of the same.

    python -m benchmarks.overlap_published     on any machine, a minute or two

One layer of each model is lowered for 8 GPUs of one node, twice: as it is, its communication and
its products one after the other, as in the systems that they compared with; and with
`overlap="auto"`. The other layers take as long. Data parallelism over more nodes is left out: it
overlaps in both of their systems. Sources are named beside the numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import gshard
from gshard.forecast import Hardware, hardware
from gshard.nn.flash import flash_attention
from gshard.nn.segments import Segments

DEVICES = 8
SEED = jnp.array([1, 2], jnp.uint32)
ASYNC_TP = "TorchTitan, introducing async tensor parallelism (2024)"
TORCHTITAN = "TorchTitan, benchmarks/asyncTP (June 2025)"
COMET = "Comet, arXiv 2502.19811"
Program = tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]


@dataclass(frozen=True)
class Llama:
    """The dims of a layer, and the sequences of a group of 8 GPUs."""

    model: int
    heads: int
    shared: int  # heads of keys and values
    hidden: int
    rows: int
    length: int = 8192


@dataclass(frozen=True)
class Row:
    """A published gain: of which program, on which hardware, and where it is from."""

    what: str
    program: Program
    machine: Hardware
    published: float
    source: str


def split(x: Array, dim: int) -> Array:
    return gshard.split(x, dim, DEVICES)


def norm(x: Array) -> Array:
    mean = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    return x * jax.lax.rsqrt(mean + 1e-5).astype(x.dtype)


def llama_layer(dims: Llama) -> Program:
    """Sequence parallelism outside of the products, tensor parallelism inside."""

    def layer(x: Array, wq: Array, wk: Array, wv: Array, wo: Array, ups: Array, w2: Array) -> Array:
        h = norm(split(x, 1))
        q, k, v = (jnp.einsum("BTM,MND->BTND", h, split(w, 1)) for w in (wq, wk, wv))
        k, v = (jnp.repeat(a, dims.heads // dims.shared, axis=2) for a in (k, v))
        one = jnp.ones(x.shape[:2], jnp.int32)
        o = flash_attention(q, k, v, Segments(one, one, True), 0.0, SEED)
        x = x + split(jnp.einsum("BTND,NDM->BTM", o, split(wo, 0)), 1)
        h = norm(x)
        gate, up = (h @ split(w, 1) for w in ups)
        return x + split((jax.nn.silu(gate) * up) @ split(w2, 0), 1)

    M, N, K, H = dims.model, dims.heads, dims.shared, dims.hidden
    D = M // N
    shapes = [(dims.rows, dims.length, M), (M, N, D), (M, K, D), (M, K, D), (N, D, M)]
    return layer, shaped(*shapes, (2, M, H), (H, M))


def experts_layer(tokens: int, experts: int, model: int, hidden: int) -> Program:
    """Dispatch, gated experts, combine: two experts a token, groups and experts over all GPUs."""

    def layer(x_EGCM: Array, ups: Array, w2_EHM: Array) -> Array:
        x_EGCM = split(split(x_EGCM, 1), 0)
        gate, up = (jnp.einsum("EGCM,EMH->EGCH", x_EGCM, split(w, 0)) for w in ups)
        y_EGCM = jnp.einsum("EGCH,EHM->EGCM", jax.nn.silu(gate) * up, split(w2_EHM, 0))
        return split(y_EGCM, 1)

    C = 2 * tokens // (experts * DEVICES)
    shapes = [(experts, DEVICES, C, model), (2, experts, model, hidden), (experts, hidden, model)]
    return layer, shaped(*shapes)


def shaped(*shapes: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]


def step(program: Program, remat: bool = False) -> Program:
    """The gradients of everything; with `remat` the forward pass is computed again."""
    fn, shapes = program
    inner = jax.checkpoint(fn) if remat else fn

    def loss(*args: Array) -> Array:
        return jnp.sum(inner(*args).astype(jnp.float32))

    return jax.grad(loss, argnums=tuple(range(len(shapes)))), shapes


def rows() -> list[Row]:
    """The published figures."""
    h100 = hardware("h100")
    half = replace(h100.network, inside_bandwidth=h100.network.inside_bandwidth * 200 / 450)
    h800 = h100.replace(name="h800", network=half)
    small = llama_layer(Llama(4096, 32, 8, 14_336, 12))
    large = llama_layer(Llama(8192, 64, 8, 28_672, 16))
    mixtral = experts_layer(16_384, 8, 4096, 14_336)
    return [
        Row("Llama 3 8B, forward", small, h100, 1.29, ASYNC_TP),
        Row("Llama 3 70B, forward", large, h100, 1.20, ASYNC_TP),
        Row("Llama 3.1 8B, step", step(small), h100, 4809.4 / 4378, TORCHTITAN),
        Row("Llama 3.1 70B, step, remat", step(large, True), h100, 652.4 / 597.3, TORCHTITAN),
        Row("Mixtral 8x7B's experts, forward", mixtral, h800, 1.96, COMET),
    ]


def gain(row: Row) -> tuple[float, float, float]:
    """Milliseconds one after the other, the share of communication in them, and overlapped."""
    fn, shapes = row.program
    usual, pieces = (
        gshard.jit(fn, devices=DEVICES, hardware=row.machine, overlap=overlap)
        .lower(*shapes)
        .forecast()
        for overlap in (False, "auto")
    )
    sent = usual.exposed_seconds + usual.hidden_seconds
    return 1e3 * usual.serial_seconds, sent / usual.serial_seconds, 1e3 * pieces.step_seconds


def main() -> None:
    print(
        "| what | ms of a layer | communication | ms overlapped | gain | published | error | by |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |")
    for row in rows():
        before, share, after = gain(row)
        found = before / after
        print(
            f"| {row.what} | {before:.2f} | {share:.0%} | {after:.2f} | {found:.2f} | "
            f"{row.published:.2f} | {found / row.published - 1:+.0%} | {row.source} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
