"""A model of the size of a common translation model, with random weights, for benchmarks of speed.

Its modules are imported where they are needed: a benchmark that starts other processes needs none.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def dims(experts: int = 0) -> Any:
    """The model of the comparison."""
    from gshard.nn.config import TransformerConfig

    return TransformerConfig(
        source_vocab=32_000,
        target_vocab=16_000,
        encoder_layers=6,
        decoder_layers=6,
        model_dim=512,
        hidden_dim=2048,
        heads=8,
        key_dim=64,
        value_dim=64,
        experts=experts,
    )


def random_weights(config: Any) -> dict[str, np.ndarray]:
    """Weights by name, of about the size that they have before training."""
    from gshard.mt.training.loading import model_like
    from gshard.mt.training.weights import named

    rng = np.random.default_rng(0)
    found = {}
    for name, leaf in named(model_like(config)).items():
        if name.endswith("scale"):
            found[name] = np.ones(leaf.shape, np.float32)
        elif name.endswith("bias"):
            found[name] = np.zeros(leaf.shape, np.float32)
        else:
            drawn = rng.standard_normal(leaf.shape, np.float32)
            drawn *= np.float32((2048 if name.endswith("wo") else 512) ** -0.5)
            found[name] = drawn
    return found
