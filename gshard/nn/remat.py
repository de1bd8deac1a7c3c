"""The memory of a training step on a device, and rematerialization chosen to fit it.

The residuals of the backward pass are counted by tracing the forward pass, without running it.
Every one of them has the tokens in some dim, as groups or as slots of experts, so a device has its
share of each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
from jax import Array

from gshard.nn.config import Batch, Remat
from gshard.nn.strategy import ONE_DEVICE, Strategy
from gshard.nn.transformer import Transformer


@dataclass(frozen=True)
class StepMemory:
    """Bytes on one device during a training step."""

    weights: int  # weights, gradients and optimizer state
    kept: int  # activations kept from the forward pass for the backward pass
    working: int  # with rematerialization, what recomputing one pair of layers keeps

    @property
    def total(self) -> int:
        """The sum; temporary buffers are not counted."""
        return self.weights + self.kept + self.working


def step_memory(
    model: Transformer,
    opt_state: Any,
    batch: Batch,
    strategy: Strategy = ONE_DEVICE,
    remat: Remat = "none",
) -> StepMemory:
    """The memory of a training step under `remat`; arrays may be given by their shapes alone.

    Weights of experts and their state are split over `strategy.expert` x `strategy.tensor`
    devices; all others are counted as replicated (or split by `tensor`). Under `split_update` their
    gradients and state are smaller: there the result is an upper bound.
    """
    spread = strategy.devices
    weights = sum(
        math.ceil(_bytes(leaf) / (spread if _is_expert(path) else 1))
        for tree in (model, model, opt_state)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    )
    kept = math.ceil(_kept(model, batch, remat) / spread)
    working = 0
    if remat == "layer":
        pairs = (model.config.encoder_layers + model.config.decoder_layers) // 2
        everything = math.ceil(_kept(model, batch, "none") / spread)
        working = (everything - kept) // max(pairs, 1)
    return StepMemory(weights, kept, working)


def choose_remat(
    model: Transformer, opt_state: Any, batch: Batch, strategy: Strategy = ONE_DEVICE
) -> Remat:
    """`model.config.remat`, or for a budget in bytes the cheapest setting that fits in it."""
    remat = model.config.remat
    if not isinstance(remat, int):
        return remat
    plain = step_memory(model, opt_state, batch, strategy, "none")
    if plain.total <= remat:
        return "none"
    least = step_memory(model, opt_state, batch, strategy, "layer")
    if least.total > remat:
        raise ValueError(
            f"a step needs about {least.total:,} bytes per device even with rematerialization "
            f"({least.weights:,} for weights, gradients and optimizer state, {least.kept:,} for "
            f"kept activations, {least.working:,} to recompute a pair of layers), but remat="
            f"{remat:,}: use more devices, a smaller batch or bfloat16"
        )
    return "layer"


def _kept(model: Transformer, batch: Batch, remat: Remat) -> int:
    """Bytes of the activations that differentiating `model` on `batch` keeps, on all devices."""

    def pullback(model: Transformer, batch: Batch, key: Array) -> Any:
        def outputs(model: Transformer) -> Any:
            logits, metrics = model(batch, key, remat=remat)
            aux = [(m.aux_loss, m.z_loss) for m in metrics if m is not None]
            return logits, aux

        return jax.vjp(outputs, model)[1]

    key = jax.eval_shape(lambda: jax.random.key(0))
    kept = jax.tree.leaves(eqx.filter_eval_shape(pullback, model, batch, key))
    known = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(model)]
    total = 0
    for leaf in kept:
        if (leaf.shape, leaf.dtype) in known:  # the weights themselves
            known.remove((leaf.shape, leaf.dtype))
        else:
            total += _bytes(leaf)
    return total


def _is_expert(path: Any) -> bool:
    return any(getattr(k, "name", None) == "experts" for k in path)


def _bytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize if hasattr(leaf.dtype, "itemsize") else 0
