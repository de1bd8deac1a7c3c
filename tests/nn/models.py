"""Small models and batches for the tests, filled by NumPy: nothing to compile."""

import functools
from dataclasses import replace

import equinox as eqx
import jax
import numpy as np

from gshard.nn import Batch, GatingConfig, Transformer, TransformerConfig

TINY = TransformerConfig(
    source_vocab=23,
    target_vocab=19,
    encoder_layers=2,
    decoder_layers=2,
    model_dim=16,
    hidden_dim=24,
    heads=2,
    key_dim=6,
    value_dim=10,
    experts=4,
    gating=GatingConfig(eval_capacity_factor=1e9),
    input_dropout=0.0,
    residual_dropout=0.0,
    attention_dropout=0.0,
)


def config(**changes):
    return replace(TINY, **changes)


def shapes(config):
    key = jax.eval_shape(lambda: jax.random.key(0))
    return eqx.filter_eval_shape(Transformer, config, key)


def model(config, seed=0):
    rng = np.random.default_rng(seed)

    def fill(path, leaf):
        name = path[-1].name
        if name in ("scale", "bias"):
            noise = 0.1 * rng.normal(size=leaf.shape)
            return (noise + (name == "scale")).astype(leaf.dtype)
        fan_in = leaf.shape[-1] if name == "table" else leaf.shape[-2]
        return (rng.normal(size=leaf.shape) * fan_in**-0.5).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, shapes(config))


@functools.lru_cache
def tokens(B=4, L=8, T=6, seed=0):
    rng = np.random.default_rng(seed)
    source = rng.integers(1, 23, (B, L))
    target = rng.integers(1, 19, (B, T))
    source[1, 5:] = 0
    target[1, 4:] = 0
    return source.astype(np.int32), target.astype(np.int32)


def batch(**sizes):
    return jax.tree.map(np.asarray, Batch.of(*tokens(**sizes)))
