"""Losses with weights in float32, in bfloat16 rounded at random, and rounded to the nearest.

    python -m benchmarks.rounding --steps 400

The same model, batches and learning rate; an update is about as large as a weight's last bit, as
it is late in a training. What is rounded to the nearest then mostly stays where it is.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from gshard.nn import Batch, TransformerConfig, adafactor, init_state, train_step

CONFIG = TransformerConfig(
    source_vocab=40,
    target_vocab=40,
    encoder_layers=2,
    decoder_layers=2,
    model_dim=48,
    hidden_dim=96,
    heads=4,
    key_dim=12,
    value_dim=12,
    experts=4,
    groups=8,
    random="hash",
)
WAYS = {
    "float32": ("float32", True),
    "bfloat16, at random": ("bfloat16", True),
    "bfloat16, to the nearest": ("bfloat16", False),
}


def reversed_words(step: int) -> Batch:
    """Rows of eight words, to be said backwards."""
    words = np.random.default_rng(step).integers(2, 40, (32, 8))
    return Batch.of(jnp.asarray(words), jnp.asarray(words[:, ::-1]), start=1)


def curve(weights: str, fused: bool, steps: int, rate: float) -> list[float]:
    """The loss of every step."""
    config = replace(CONFIG, weight_dtype=weights)  # type: ignore[arg-type]
    optimizer = adafactor(lambda t: rate, fused=fused, min_dim_to_factor=32)
    state = init_state(config, optimizer, jax.random.key(0))
    step = jax.jit(functools.partial(train_step, optimizer=optimizer), donate_argnums=0)
    losses = []
    for n in range(steps):
        state, metrics = step(state, reversed_words(n), jax.random.key(1))
        losses.append(float(metrics.nll))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rate", type=float, default=2e-3, help="of an update to its weight")
    parser.add_argument("--out", type=Path, help="where to write JSON")
    args = parser.parse_args()
    curves = {name: curve(*way, args.steps, args.rate) for name, way in WAYS.items()}
    marks = np.linspace(0, args.steps, 6).astype(int)
    print("mean loss of steps  " + "  ".join(f"{name:>24}" for name in curves))
    for a, b in itertools.pairwise(marks):
        means = [float(np.mean(losses[a:b])) for losses in curves.values()]
        print(f"{a:8} to {b:6}  " + "  ".join(f"{mean:24.3f}" for mean in means))
    if args.out:
        args.out.write_text(json.dumps(curves))


if __name__ == "__main__":
    main()
