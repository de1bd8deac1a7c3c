"""`python -m benchmarks.calibration`: forecasts of unseen batches after one profiled step.

A training step of two Llama-like layers is profiled with one batch, on the devices that JAX has;
the hardware that is fitted to it forecasts other batches, which are then measured. On one H200:
about two minutes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import gshard

LENGTH = 2048


def block(x: Any, w: dict[str, Any], heads: int) -> Any:
    def norm(x: Any) -> Any:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)
        return (wide * scale).astype(x.dtype)

    y = norm(x)
    q, k, v = ((y @ w[n]).reshape(*x.shape[:2], heads, -1) for n in "qkv")
    x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ w["out"]
    y = norm(x)
    return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]


def step(ws: Any, x: Any) -> Any:
    ws, x = gshard.fsdp(ws), gshard.split(x, 0, jax.device_count())

    def loss(ws: Any) -> Any:
        y = x
        for w in ws:
            y = block(y, w, heads=16)
        return jnp.mean(y.astype(jnp.float32) ** 2)

    gradients = jax.grad(loss)(ws)
    return jax.tree.map(lambda w, g: w - 1e-3 * g, ws, gradients)


def profiled(width: int, rows: int, machine: Any) -> Any:
    """The profile of a few steps, with a forecast for `machine`."""
    d, f = width, 4 * width
    sizes = {**dict.fromkeys(("q", "k", "v", "out"), (d, d)), "gate": (d, f), "up": (d, f)}
    sizes["down"] = (f, d)
    key = jax.random.key(0)
    ws = [{n: 0.02 * jax.random.normal(key, s, jnp.bfloat16) for n, s in sizes.items()}] * 2
    x = jax.random.normal(key, (rows, LENGTH, d), jnp.bfloat16)
    lowered = gshard.jit(step).lower(ws, x)
    compiled = lowered.compile()
    jax.block_until_ready(compiled(ws, x))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(5):
                jax.block_until_ready(compiled(ws, x))
        return lowered.measured(folder, machine)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--fit", type=int, default=8, help="rows of the profiled batch")
    parser.add_argument("--unseen", type=int, nargs="*", default=[2, 4, 12, 16])
    parser.add_argument("--out", type=Path, help="also write the rows here, as JSON")
    args = parser.parse_args()
    first = profiled(args.width, args.fit, None)
    print(first)
    rows = [{"rows": args.fit, "measured": first.measured, "before": first.forecast}]
    for count in args.unseen:
        found = profiled(args.width, count, first.hardware)
        rows.append({"rows": count, "measured": found.measured, "fitted": found.forecast})
        off = found.forecast / found.measured - 1
        print(f"{count} rows: {found.measured:.4f} s measured, {found.forecast:.4f} s, {off:+.1%}")
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
