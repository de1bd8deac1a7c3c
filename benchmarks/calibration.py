"""`python -m benchmarks.calibration`: forecasts of unseen batches after one calibration.

A training step of two Llama-like layers is profiled with some batches, on the devices that JAX has;
the hardware that is fitted to them all forecasts other batches, which are then measured. On one
H200: about two minutes. XLA runs many operators as one CUDA graph, whose parts a trace does not
name: give `XLA_FLAGS=--xla_gpu_enable_command_buffer=`.
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


def row(count: int, found: Any, kind: str) -> dict[str, Any]:
    """A line of the table, printed as soon as it is there."""
    off = found.forecast / found.measured - 1
    print(f"| {count} | {kind} | {found.measured:.4f} | {found.forecast:.4f} | {off:+.1%} |")
    return {"rows": count, "kind": kind, "measured": found.measured, "forecast": found.forecast}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--fit", type=int, nargs="+", default=[2, 8, 20], help="profiled batches")
    parser.add_argument("--unseen", type=int, nargs="*", default=[1, 4, 12, 16, 24])
    parser.add_argument("--out", type=Path, help="also write the rows here, as JSON")
    args = parser.parse_args()
    device = jax.devices()[0].device_kind
    print(f"{jax.device_count()} x {device}\n\n| rows | | measured s | forecast s | off |")
    print("|---:|---|---:|---:|---:|")
    seen = [profiled(args.width, count, None) for count in args.fit]
    rows = [row(n, found, "before") for n, found in zip(args.fit, seen, strict=True)]
    machine = seen[0].fitted_with(*seen[1:]).hardware
    for count in sorted([*args.fit, *args.unseen]):
        kind = "fitted" if count in args.fit else "unseen"
        rows.append(row(count, profiled(args.width, count, machine), kind))
    unseen = [abs(r["forecast"] / r["measured"] - 1) for r in rows if r["kind"] == "unseen"]
    print(f"\nunseen batches: {max(unseen, default=0):.1%} off at most; {machine.efficiency}")
    print(f"\n{seen[-1]}")
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
