"""The loss and gradient of a slice of the logits, in one pass over memory.

XLA reads float32 logits three times, for their maximum, for the sum of their exponentials and for
their gradient. Here a program has an entire row in registers, reads it once and writes its
gradient. Written in Pallas for Triton; `reference` is its oracle, and its replacement without a
GPU. Dims: R tokens, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from gshard.tensors.annotate import target_platform

_LARGEST = 1 << 15  # vocabulary: 128 numbers in each of 256 threads, of 255 registers at most
_SMALLEST = 128  # part of a row
_LOG2_E = math.log2(math.e)  # hardware has powers of 2 only


def fits(logits: Array, devices: int = 1) -> bool:
    """Whether the kernel can be used: on GPUs, for rows that registers can hold."""
    V = logits.shape[-1]
    return (
        target_platform() == "gpu"
        and V <= _LARGEST
        and V % _SMALLEST == 0
        and len(logits) % devices == 0
        and logits.size // devices < 1 << 31  # numbers of 32 bits count places
    )


def reference(
    logits_RV: Array, labels_R: Array, weights_R: Array, label_smoothing: float, dtype: Any
) -> tuple[Array, Array]:
    """log Z of each token, and the gradient of its logits: of `weights_R` * -log p(label)."""
    log_z_R = jax.nn.logsumexp(logits_RV, axis=-1)
    probs_RV = jnp.exp(logits_RV - log_z_R[..., None])
    tokens = jax.lax.broadcasted_iota(labels_R.dtype, logits_RV.shape, logits_RV.ndim - 1)
    is_label_RV = tokens == labels_R[..., None]
    target_RV = jnp.where(is_label_RV, 1.0 - label_smoothing, 0.0)
    target_RV = target_RV + label_smoothing / logits_RV.shape[-1]
    return log_z_R, ((probs_RV - target_RV) * weights_R[..., None]).astype(dtype)


@functools.partial(jax.jit, static_argnums=(3, 4), static_argnames="interpret")
def log_z_and_grads(
    logits_RV: Array,
    labels_R: Array,
    weights_R: Array,
    label_smoothing: float,
    dtype: Any,
    *,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """The same by the kernel."""
    R, V = logits_RV.shape
    row, number = pl.BlockSpec((None, V), lambda r: (r, 0)), pl.BlockSpec((1,), lambda r: (r,))
    log_z_R, grads_RV = pl.pallas_call(
        functools.partial(_kernel, label_smoothing=label_smoothing),
        grid=(R,),
        in_specs=[row, number, number],
        out_specs=[number, row],
        out_shape=[jax.ShapeDtypeStruct((R,), jnp.float32), jax.ShapeDtypeStruct((R, V), dtype)],
        compiler_params=plgpu.CompilerParams(num_warps=max(2, pl.next_power_of_2(V) // 4096)),
        interpret=interpret,
        name="vocabulary_grads",
    )(logits_RV, labels_R, weights_R)
    return log_z_R, grads_RV


def _kernel(
    logits_ref: Any, label_ref: Any, weight_ref: Any, log_z_ref: Any, grads_ref: Any,
    *, label_smoothing: float,
) -> None:  # fmt: skip
    V = logits_ref.shape[-1]
    parts = _parts(V)
    logits = [logits_ref[part].astype(jnp.float32) for part in parts]
    top = functools.reduce(jnp.maximum, [jnp.max(x) for x in logits])
    powers = [jnp.exp2(x * _LOG2_E - top * _LOG2_E) for x in logits]
    total = functools.reduce(jnp.add, [jnp.sum(x) for x in powers])
    log_z_ref[...] = jnp.broadcast_to(top + jnp.log(total), (1,))
    # As few instructions per logit as possible: a program does not read memory meanwhile.
    label, weight = label_ref[0], weight_ref[0]
    slope, even = weight / total, label_smoothing / V * weight
    own = (1.0 - label_smoothing) * weight
    for part, power in zip(parts, powers, strict=True):
        grads = power * slope - even
        is_label = jnp.arange(part.size, dtype=label.dtype) == label - part.start
        grads_ref[part] = jnp.where(is_label, grads - own, grads).astype(grads_ref.dtype)


def _parts(V: int) -> list[pl.Slice]:
    """A row in parts whose sizes are powers of 2, as Triton requires."""
    sizes = [1 << bit for bit in range(V.bit_length()) if V >> bit & 1][::-1]
    return [pl.ds(sum(sizes[:n]), size) for n, size in enumerate(sizes)]
