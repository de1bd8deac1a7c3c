"""The update of Muon on 32 devices: all matrices on every device, or dealt out: a forecast.

    python -m benchmarks.muon_owners    the table of docs/howto/expert-meshes.md

`optax.contrib.muon` as it is, on the matrices of 16 layers of 4096 x 14336, under FSDP. Megatron-LM
(6676) measured 632 ms where every device orthogonalizes all matrices, and 157 ms where each matrix
has an owner, on 32 GB300s and for a model of its own: the ratio is what compares. The first row is
the update on one device; what it takes to gather gradients for it is left out.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

import gshard
from gshard.graph.readable import size

DEVICES, HARDWARE, LAYERS, M, F = 32, "gb200", 16, 4096, 14336
MUON = optax.contrib.muon(1e-3)


def fsdp(tree):
    return jax.tree.map(lambda x: gshard.split(x, 0, DEVICES) if jnp.ndim(x) == 2 else x, tree)


def update(weights, state, grads):
    """The update alone: from gradients that were scattered to weights that are split."""
    changes, state = MUON.update(grads, state, weights)
    return optax.apply_updates(weights, changes), state


def update_under_fsdp(*arguments):
    return fsdp(update(*map(fsdp, arguments)))


def main() -> None:
    shapes = {"q": (M, M), "out": (M, M), "into": (M, F), "up": (M, F), "down": (F, M)}
    weights = [
        {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    ] * LAYERS
    state = jax.eval_shape(MUON.init, weights)
    print("| update | sent | forecast | measured by Megatron-LM |\n|---|---:|---:|---:|")
    rows = {"all matrices on every device": (update, 1, 632),
            "gshard, under FSDP": (update_under_fsdp, DEVICES, 157)}  # fmt: skip
    for name, (step, devices, measured) in rows.items():
        lowered = gshard.jit(step, devices=devices, hardware=HARDWARE).lower(
            weights, state, weights
        )
        sent = sum(c.total_bytes for c in lowered.collectives)
        seconds = lowered.forecast(HARDWARE).step_seconds
        print(f"| {name} | {size(sent)} | {1e3 * seconds:,.0f} ms | {measured} ms |")


if __name__ == "__main__":
    main()
