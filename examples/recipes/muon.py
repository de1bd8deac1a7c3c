"""Muon with its momentum split by layer: each device orthogonalizes the updates of its own layers.

Data parallel otherwise. A device needs the summed gradients of its layers alone (ReduceScatter),
and gives their new weights to all (AllGather). The layers run in a scan, or one after the other.
"""

import jax
import jax.numpy as jnp

import gshard
from examples.recipes.recipe import D, Recipe, all_gather, all_reduce, nbytes, reduce_scatter, show
from examples.recipes.transformer import SMALL, Size


def orthogonal(g_LMM):
    """Newton-Schulz iterations towards the nearest orthogonal matrices."""
    x = g_LMM / (jnp.linalg.norm(g_LMM, axis=(1, 2), keepdims=True) + 1e-7)
    for _ in range(3):
        gram = x @ x.swapaxes(1, 2)
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x


def layer(x_BM, w_MM):
    return x_BM + jnp.tanh(x_BM @ w_MM)


def loss_in_scan(w_LMM, x_BM):
    y_BM, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x_BM, w_LMM)
    return jnp.mean((y_BM - x_BM) ** 2)


def loss_unrolled(layers, x_BM):
    y_BM = x_BM
    for w_MM in layers:
        y_BM = layer(y_BM, w_MM)
    return jnp.mean((y_BM - x_BM) ** 2)


def update(grads_LMM, momentum_LMM):
    momentum_LMM = 0.95 * gshard.split(momentum_LMM, 0, D) + grads_LMM
    return gshard.split(momentum_LMM, 0, D), -0.02 * orthogonal(momentum_LMM)


def step_in_scan(w_LMM, momentum_LMM, x_BM):
    w_LMM, x_BM = gshard.replicate(w_LMM), gshard.split(x_BM, 0, D)
    value, grads = jax.value_and_grad(loss_in_scan)(w_LMM, x_BM)
    momentum_LMM, change = update(grads, momentum_LMM)
    return gshard.replicate(w_LMM + change), momentum_LMM, value


def step_unrolled(layers, momentum_LMM, x_BM):
    layers, x_BM = [gshard.replicate(w) for w in layers], gshard.split(x_BM, 0, D)
    value, grads = jax.value_and_grad(loss_unrolled)(layers, x_BM)
    momentum_LMM, change = update(jnp.stack(grads), momentum_LMM)
    return list(gshard.replicate(jnp.stack(layers) + change)), momentum_LMM, value


def recipes(size: Size = SMALL) -> list[Recipe]:
    L, M, B = 2 * D, size.M, size.B * size.S
    stack = jax.ShapeDtypeStruct((L, M, M), jnp.float32)
    batch = jax.ShapeDtypeStruct((B, M), jnp.float32)
    expert = reduce_scatter(nbytes(stack)) + all_gather(nbytes(stack)) + all_reduce(4)
    layers = [jax.ShapeDtypeStruct((M, M), jnp.float32)] * L
    return [
        Recipe("Muon by layer, layers in scan", step_in_scan, (stack, stack, batch), expert),
        Recipe("Muon by layer, unrolled", step_unrolled, (layers, stack, batch), expert),
    ]


if __name__ == "__main__":
    show(recipes())
