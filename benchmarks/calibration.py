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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import gshard
from gshard.explanation.profiled import trace_steps

STEPS = 5  # traced at least


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


class Step(NamedTuple):
    """A step with some rows: lowered, and the folder of its trace."""

    lowered: Any
    folder: str


def arguments(shape: tuple[int, int], width: int = 4096) -> tuple[Any, Any]:
    """The weights of a step and its activations, abstract."""
    d, f = width, 4 * width
    sizes = {**dict.fromkeys(("q", "k", "v", "out"), (d, d)), "gate": (d, f), "up": (d, f)}
    sizes["down"] = (f, d)
    ws = [{n: jax.ShapeDtypeStruct(s, jnp.bfloat16) for n, s in sizes.items()}] * 2
    return ws, jax.ShapeDtypeStruct((*shape, d), jnp.bfloat16)


def traced(given: tuple[Any, Any], warm: float, folder: str) -> Step:
    """A second of steps under the profiler, after `warm` seconds of them."""
    lowered = gshard.jit(step).lower(*given)
    compiled = lowered.compile()
    trace_steps(compiled, given, STEPS, folder, warm)
    Path(folder, "program.txt").write_text(compiled.as_text())
    return Step(lowered, folder)


def row(count: int, step: Step, kind: str, machine: Any = None) -> dict[str, Any]:
    """A line of the table, printed as soon as it is known."""
    found = step.lowered.measured(step.folder, machine)
    off = found.forecast / found.measured - 1
    times = f"{found.steps} | {found.measured:.4f} | {found.forecast:.4f} | {off:+.1%}"
    print(f"| {count} | {kind} | {times} |", flush=True)
    own = {"rows": count, "kind": kind, "measured": found.measured, "forecast": found.forecast}
    return {**own, "steps": found.steps, "profile": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--fit", type=int, nargs="+", default=[2, 8], help="profiled batches")
    parser.add_argument("--unseen", type=int, nargs="*", default=[1, 4, 12])
    parser.add_argument("--warm", type=float, default=2.0, help="seconds of steps before a trace")
    parser.add_argument("--traces", help="keep traces and compiled programs below this folder")
    parser.add_argument("--out", type=Path, help="also write the rows here, as JSON")
    args = parser.parse_args()
    device = jax.devices()[0].device_kind
    print(f"{jax.device_count()} x {device}, {args.warm:g} s of steps before each trace\n")
    print("| rows | | steps | measured s | forecast s | off |\n|---:|---|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as made:
        folder = args.traces or made

        def at(count: int) -> Step:
            given = arguments((count, args.length), args.width)
            return traced(given, args.warm, f"{folder}/{count}")

        fit = {count: at(count) for count in args.fit}
        rows = [row(count, found, "before") for count, found in fit.items()]
        first, *others = (own["profile"] for own in rows)
        machine = first.fitted_with(*others).hardware
        rows += [row(count, found, "fitted", machine) for count, found in fit.items()]
        rows += [row(count, at(count), "unseen", machine) for count in args.unseen]
    unseen = [r["forecast"] / r["measured"] - 1 for r in rows if r["kind"] == "unseen"]
    print(f"\nunseen batches: {max(map(abs, unseen), default=0):.1%} off at most")
    for own in rows[len(args.fit) :]:
        print(f"\nwith {own['rows']} rows: {own['profile']}")
    if args.out:
        kept = [{name: v for name, v in own.items() if name != "profile"} for own in rows]
        args.out.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
