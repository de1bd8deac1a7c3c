"""Attention alone, forward and backward, at the paper's dims: the kernel beside its peers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu.packed import packed_batch
from benchmarks.gpu.timing import milliseconds
from gshard.nn.flash import Blocks, Segments, flash_attention, reference


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of the ways that the case names; an error stands in its place."""
    B, T, N, D = case["tokens"] // 256, 256, 16, 128
    segments = jnp.asarray(packed_batch(B, (T, T), (64000, 32000)).source_segments)
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, g = (jax.random.normal(key, (B, T, N, D), jnp.bfloat16) for key in keys)
    seed = jnp.array([1, 2], jnp.uint32)
    found: dict[str, Any] = {}
    for causal in (False, True):
        visible = Segments(segments, segments, causal)
        want = None
        for name, way in ways(visible, seed, case["blocks"]).items():
            label = f"{name}{', causal' if causal else ''}"
            try:
                found[label], got = measure_way(way, (q, k, v, g))
                want = got if want is None else want
                found[label]["relative_errors"] = errors(got, want, segments > 0)
            except Exception as error:
                found[label] = {"error": str(error)[:300]}
            print(label, found[label], flush=True)
    return found


def ways(visible: Segments, seed: Any, blocks: list) -> dict[str, Any]:
    """Attention by einsums, by the kernel in several shapes, and cuDNN's without dropout."""

    def kernel(shape: Any) -> Any:
        return lambda q, k, v: flash_attention(q, k, v, visible, 0.1, seed, Blocks(*shape))

    return {
        "einsums": lambda q, k, v: reference(q, k, v, visible, 0.1, seed),
        **{f"flash {shape}": kernel(shape) for shape in blocks},
        "cudnn without dropout": lambda q, k, v: jax.nn.dot_product_attention(
            q, k, v, mask=visible.mask()[:, None], implementation="cudnn"
        ),
    }


def measure_way(way: Any, arrays: Any) -> tuple[dict[str, Any], Any]:
    def both(q: Any, k: Any, v: Any, g: Any) -> Any:
        out, pull = jax.vjp(way, q, k, v)
        return out, pull(g)

    compiled = jax.jit(both).lower(*arrays).compile()
    forward = jax.jit(way).lower(*arrays[:3]).compile()
    times = {
        "ms": milliseconds(compiled, *arrays),
        "forward_ms": milliseconds(forward, *arrays[:3]),
    }
    return times, compiled(*arrays)


def errors(got: Any, want: Any, seen_BT: Any) -> list[float]:
    """Lengths of the differences over those of the wanted, where there is something to see."""

    def length(x: Any) -> Any:
        return jnp.linalg.norm((x * seen_BT[:, :, None, None]).astype(jnp.float32).ravel())

    leaves = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return [float(length(a - b) / length(b)) for a, b in leaves]
