"""Our kernels beside what could replace them: plain XLA, cuDNN, JAX's kernels for Mosaic GPU.

    python -m benchmarks.gpu.alternatives --out kernels.json    on a GPU, a minute or two
    python -m benchmarks.gpu.alternatives --show kernels.json   the table of an earlier run

Ours are written in Pallas for Triton, a backend that JAX will drop. Each has a plain form that is
its oracle. The table says what the plain form, or another library's kernel, would cost instead.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.gpu.packed import packed_batch
from benchmarks.gpu.timing import milliseconds
from gshard.nn.flash import Segments, flash_attention, reference
from gshard.nn.grouped import times
from gshard.nn.kernels import attention as kernels
from gshard.nn.kernels import float8, vocabulary
from gshard.nn.layers import normalize, normalize_with_residual

Ways = dict[str, Callable[..., Any]]
OURS = "gshard"
PLAIN = "plain"
SEED = jnp.array([1, 2], jnp.uint32)


Shapes = list[jax.ShapeDtypeStruct]


def shaped(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def filled(shapes: Shapes) -> list[jax.Array]:
    """Normal floats, and integers 0, 1, 2, ..."""
    return [
        jnp.arange(s.size, dtype=s.dtype).reshape(s.shape)
        if jnp.issubdtype(s.dtype, jnp.integer)
        else jax.random.normal(jax.random.key(number), s.shape, s.dtype)
        for number, s in enumerate(shapes)
    ]


def attention(length: int, packed: bool, tokens: int = 65_536) -> tuple[Ways, Shapes]:
    """Attention of 16 heads of 128 without dropout, which some lack: among all tokens of a row, or
    within packed sentences."""
    shape = shaped(tokens // length, length, 16, 128)
    segments = jnp.ones(shape.shape[:2], jnp.int32)
    if packed:
        segments = jnp.asarray(packed_batch(shape.shape[0], (length, length), (64_000, 64_000))[1])
    visible = Segments(segments, segments)

    def ours(q: Any, k: Any, v: Any) -> Any:
        return flash_attention(q, k, v, visible, 0.0, SEED)

    def plain(q: Any, k: Any, v: Any) -> Any:
        return reference(q, k, v, visible, 0.0, SEED)

    def mosaic(q: Any, k: Any, v: Any) -> Any:
        from jax.experimental.pallas.ops.gpu import attention_mgpu

        config = attention_mgpu.TuningConfig(64, 64, 2, True, False, 1, 64, 64, 64, 64)
        # It takes float16 alone.
        q, k, v = (x.astype(jnp.float16) for x in (q * 128**-0.5, k, v))
        return attention_mgpu.attention(q, k, v, config).astype(jnp.bfloat16)

    def cudnn(q: Any, k: Any, v: Any) -> Any:
        mask = visible.mask()[:, None] if packed else None
        return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation="cudnn")

    ways = {OURS: ours, PLAIN: plain, "cuDNN": cudnn}
    return ways if packed else ways | {"Mosaic GPU": mosaic}, [shape] * 3


def with_gradients(ways: Ways) -> Ways:
    """Each way with the gradients of its arguments."""

    def both(way: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            out, pull = jax.vjp(way, *args)
            return out, pull(jax.tree.map(jnp.ones_like, out))

        return run

    return {name: both(way) for name, way in ways.items()}


def norm() -> tuple[Ways, Shapes]:
    """A residual layer's normalization, forward and backward."""

    def plain(x: Any, scale: Any, bias: Any) -> Any:
        return normalize(x, scale, bias), x

    return with_gradients({OURS: normalize_with_residual, PLAIN: plain}), [
        shaped(64, 1024, 1024),
        shaped(1024),
        shaped(1024),
    ]


def loss() -> tuple[Ways, Shapes]:
    """log Z and the gradient of the logits of 8,192 tokens, 32,000 pieces."""
    args = [
        shaped(8192, 32_000, dtype=jnp.float32),
        shaped(8192, dtype=jnp.int32),
        shaped(8192, dtype=jnp.float32),
    ]
    ways = {OURS: vocabulary.log_z_and_grads, PLAIN: vocabulary.reference}
    return {n: lambda *a, way=w: way(*a, 0.1, jnp.bfloat16) for n, w in ways.items()}, args


def eight_bits() -> tuple[Ways, Shapes]:
    """Hidden units rounded to eight bits, in both orientations."""
    args = [shaped(16, 8192, 8192), shaped(16, dtype=jnp.float32)]
    ways = {OURS: float8.by_kernel, PLAIN: float8.reference}
    return {n: lambda *a, way=w: way(*a, dtype=jnp.float8_e4m3fn) for n, w in ways.items()}, args


def experts(rows: int) -> tuple[Ways, Shapes]:
    """Products of 16 experts with unequal numbers of tokens; beside them equal numbers, padded."""
    G, K, N, block = 16, 1024, 8192, 128
    cuts = np.sort(np.random.default_rng(0).integers(0, rows // block, G - 1))
    counts = np.diff([0, *cuts, rows // block])
    sizes = jnp.asarray(counts * block, jnp.int32)
    expert = jnp.asarray(np.repeat(np.arange(G), counts), jnp.int32)

    def ragged(x: Any, w: Any) -> Any:
        return lax.ragged_dot(x, w, sizes)

    def ours(x: Any, w: Any) -> Any:
        return times(x.reshape(-1, block, K), w, expert).reshape(rows, N)

    def mosaic(x: Any, w: Any) -> Any:
        from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

        return ragged_dot(
            x, w, group_sizes=sizes, block_m=128, block_n=128, block_k=64,
            max_concurrent_steps=4, grid_block_n=8,
        )  # fmt: skip

    def padded(x: Any, w: Any) -> Any:
        return jnp.einsum("GCM,GMH->GCH", x.reshape(G, rows // G, K), w)

    ways = {OURS: ours, "lax.ragged_dot": ragged, "ragged_dot_mgpu": mosaic, "equal sizes": padded}
    return ways, [shaped(rows, K), shaped(G, K, N)]


def few_tokens() -> tuple[Ways, Shapes]:
    """The experts of a decoding step: 64 blocks of 64 tokens, 32 experts of 512 x 2048."""
    slots = jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 32, 64)), jnp.int32)

    def ours(x: Any, w: Any) -> Any:
        return times(x, w, slots, relu=True)

    def plain(x: Any, w: Any) -> Any:
        return jax.nn.relu(jnp.einsum("NCM,NMH->NCH", x, w[slots]))

    return {OURS: ours, PLAIN: plain}, [shaped(64, 64, 512), shaped(32, 512, 2048)]


def from_cache() -> tuple[Ways, Shapes]:
    """Self-attention of a decoding step: 256 sentences, beam 4, half of 64 positions written."""
    B, K, N, L, D = 256, 4, 16, 256, 128
    visible = jnp.broadcast_to(jnp.arange(L) < L // 2, (B, K, L))

    def ours(q: Any, k: Any, v: Any) -> Any:
        return kernels.attend_to_cache(q, k, v, visible, L // 2)

    def plain(q: Any, k: Any, v: Any) -> Any:
        return kernels.cache_reference(q, k, v, visible)

    return {OURS: ours, PLAIN: plain}, [shaped(B, K, N, D), *[shaped(B, N, L, D)] * 2]


def cases() -> Iterator[tuple[str, Ways, Shapes]]:
    """What is compared: a title, the ways, the shapes of their arguments."""
    for length, packed in itertools.product((256, 2048), (True, False)):
        ways, args = attention(length, packed)
        title = f"attention, rows of {length}{', packed' if packed else ''}"
        yield f"{title}, forward", ways, args
        yield f"{title}, with gradients", with_gradients(ways), args
    yield "normalization with gradients", *norm()
    yield "loss and gradient of logits", *loss()
    yield "rounding to 8 bits, both orientations", *eight_bits()
    yield "experts, 65,536 tokens", *experts(65_536)
    yield "experts, a decoding step", *few_tokens()
    yield "attention, a decoding step", *from_cache()


def measure() -> list[dict[str, Any]]:
    """A row for each case and way; one that fails has its error."""
    rows: list[dict[str, Any]] = []
    for title, ways, shapes in cases():
        args, want = filled(shapes), None
        for name, way in ways.items():
            row: dict[str, Any] = {"what": title, "way": name}
            try:
                compiled = jax.jit(way).lower(*args).compile()
                row["ms"] = milliseconds(compiled, *args)
                got = jax.tree.leaves(compiled(*args))[0].astype(jnp.float32)
                if name != "equal sizes":
                    want = got if want is None else want
                    row["difference"] = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"[:200]
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds, and how many times those of the first way of each case."""
    lines = ["| what | way | ms | of the first | differs by |"]
    lines += ["| --- | --- | ---: | ---: | ---: |"]
    first: dict[str, float] = {}
    for row in rows:
        if "ms" not in row:
            why = row["error"].splitlines()[0].replace("|", " ")
            lines.append(f"| {row['what']} | {row['way']} | {why} |  |  |")
            continue
        ratio = row["ms"] / first.setdefault(row["what"], row["ms"])
        differs = f"{row['difference']:.1e}" if "difference" in row else ""
        lines.append(
            f"| {row['what']} | {row['way']} | {row['ms']:.3f} | {ratio:.2f} | {differs} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON to write")
    parser.add_argument("--show", type=Path, help="JSON of an earlier run: measure nothing")
    args = parser.parse_args()
    rows = json.loads(args.show.read_text()) if args.show else measure()
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
