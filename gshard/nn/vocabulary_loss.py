"""The loss of the output projection, without the logits of the entire batch in memory.

With a vocabulary of 32,000 the float32 logits are as large as all weights of some models. Here
they are computed for a slice of every sequence at a time, and what the backward pass needs, the
gradients of the activations and of the table, is computed from them at once: nothing is computed
twice. That works because the loss is a sum over tokens with known weights: its cotangent is a
scalar.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from gshard.nn.kernels.vocabulary import fits, log_z_and_grads, reference
from gshard.nn.strategy import Strategy


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def weighted_nll(
    x_BTM: Array,
    table_VM: Array,
    labels_BT: Array,
    weights_BT: Array,
    label_smoothing: float,
    chunks: int,
    kernels: Strategy | None = None,
) -> Array:
    """The sum of `weights_BT` * -log p(label); the logits are `x_BTM` times the table.

    The logits are computed in at most `chunks` slices, as many as divide the length of a sequence.
    With `kernels`, each device of that strategy runs a kernel on the logits of its own sequences,
    if supported.
    """

    def body(total: Array, chunk: tuple[Array, ...]) -> tuple[Array, None]:
        x, labels, weights = chunk
        log_z = jax.nn.logsumexp(logits_of(x, table_VM), axis=-1)
        nll = log_z - _expected_logit(x, table_VM, labels, label_smoothing)
        return total + jnp.sum(nll * weights), None

    slices = tuple(cut(x, chunks) for x in (x_BTM, labels_BT, weights_BT))
    return jax.lax.scan(body, jnp.zeros(()), slices)[0]


def _forward(
    x_BTM: Array,
    table_VM: Array,
    labels_BT: Array,
    weights_BT: Array,
    label_smoothing: float,
    chunks: int,
    kernels: Strategy | None,
) -> tuple[Array, tuple[Array, Array]]:
    def body(carry: tuple[Array, Array], chunk: tuple[Array, ...]) -> tuple[Any, Array]:
        total, table_grad = carry
        x, labels, weights = chunk
        logits = logits_of(x, table_VM)
        log_z, grad = _log_z_and_grads(logits, labels, weights, label_smoothing, x.dtype, kernels)
        nll = log_z - _expected_logit(x, table_VM, labels, label_smoothing)
        x_grad = jnp.einsum("BTV,VM->BTM", grad, table_VM.astype(x.dtype))
        table_grad = table_grad + jnp.einsum(
            "BTV,BTM->VM", grad, x, preferred_element_type=jnp.float32
        )
        return (total + jnp.sum(nll * weights), table_grad), x_grad

    slices = tuple(cut(x, chunks) for x in (x_BTM, labels_BT, weights_BT))
    empty = jnp.zeros(()), jnp.zeros(table_VM.shape, jnp.float32)
    (total, table_grad), x_grads = jax.lax.scan(body, empty, slices)
    x_grad = jnp.moveaxis(x_grads, 0, 1).reshape(x_BTM.shape)
    return total, (x_grad, table_grad.astype(table_VM.dtype))


def _backward(
    label_smoothing: float,
    chunks: int,
    kernels: Strategy | None,
    grads: tuple[Array, Array],
    scale: Array,
) -> tuple[Array, Array, None, None]:
    x_grad, table_grad = ((scale * grad).astype(grad.dtype) for grad in grads)
    return x_grad, table_grad, None, None


weighted_nll.defvjp(_forward, _backward)


def _log_z_and_grads(
    logits_BTV: Array,
    labels_BT: Array,
    weights_BT: Array,
    label_smoothing: float,
    dtype: Any,
    kernels: Strategy | None,
) -> tuple[Array, Array]:
    if kernels is None or not fits(logits_BTV, kernels.devices):
        return reference(logits_BTV, labels_BT, weights_BT, label_smoothing, dtype)
    B, _, V = logits_BTV.shape
    logits, labels, weights = map(kernels.own_groups, (logits_BTV, labels_BT, weights_BT))
    flat = logits.reshape(-1, V), labels.reshape(-1), weights.reshape(-1)
    log_z, grads = log_z_and_grads(*flat, label_smoothing, dtype)
    shaped = log_z.reshape(labels.shape), grads.reshape(logits.shape)
    return kernels.all_groups(shaped[0], B), kernels.all_groups(shaped[1], B)


def logits_of(x: Array, table_VM: Array) -> Array:
    """The logits in float32."""
    return jnp.einsum(
        "BTM,VM->BTV", x, table_VM.astype(x.dtype), preferred_element_type=jnp.float32
    )


def _expected_logit(x: Array, table_VM: Array, labels: Array, label_smoothing: float) -> Array:
    """The label's logit, its mass smoothed evenly over the vocabulary.

    Straight from the rows of the table: no pass over all logits is needed to pick one of each.
    """
    rows = jnp.take(table_VM, labels, axis=0, mode="clip").astype(x.dtype)
    found = jnp.einsum("BTM,BTM->BT", x, rows, preferred_element_type=jnp.float32)
    if label_smoothing == 0.0:
        return found
    mean_M = jnp.mean(table_VM.astype(jnp.float32), axis=0)
    even = jnp.einsum("BTM,M->BT", x.astype(jnp.float32), mean_M)
    return (1.0 - label_smoothing) * found + label_smoothing * even


def cut(x: Array, chunks: int) -> Array:
    """[B, T, ...] as [chunks, B, T / chunks, ...]: each slice has a part of every sequence."""
    B, T, *rest = x.shape
    count = max(n for n in range(1, chunks + 1) if T % n == 0)
    return jnp.moveaxis(x.reshape(B, count, T // count, *rest), 1, 0)
