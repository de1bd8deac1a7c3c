"""Ulysses: the sequence is split between layers, the heads are split in attention.

Queries, keys and values are exchanged for attention, its results are exchanged back.
"""

import jax
import jax.numpy as jnp

import gshard
from examples.recipes.recipe import D, Recipe, all_reduce, all_to_all, nbytes, show
from examples.recipes.transformer import SMALL, Size


def loss(weights, x_BTM):
    by_head = (
        gshard.split(jnp.einsum("BTM,MHE->BTHE", x_BTM, w_MHE), 2, D) for w_MHE in weights["qkv"]
    )
    y_BTHE = gshard.split(jax.nn.dot_product_attention(*by_head, is_causal=True), 2, D)
    y_BTM = jnp.einsum("BTHE,HEM->BTM", gshard.split(y_BTHE, 1, D), weights["out"])
    return jnp.mean((y_BTM - x_BTM) ** 2)


def step(weights, x_BTM):
    weights = jax.tree.map(gshard.replicate, weights)
    value, grads = jax.value_and_grad(loss)(weights, gshard.split(x_BTM, 1, D))
    return jax.tree.map(lambda w, g: gshard.replicate(w - 1e-3 * g), weights, grads), value


def recipes(size: Size = SMALL) -> list[Recipe]:
    B, T, M = 2, size.B * size.S // 2, size.M  # long sequences: attention is most of the work
    weights = {
        "qkv": jax.ShapeDtypeStruct((3, M, D, M // D), jnp.float32),
        "out": jax.ShapeDtypeStruct((D, M // D, M), jnp.float32),
    }
    tokens = jax.ShapeDtypeStruct((B, T, M), jnp.float32)
    # Queries, keys, values and results, forwards and backwards; the gradients and the loss.
    expert = 8 * all_to_all(nbytes(tokens) / D) + all_reduce(nbytes(weights) + 4)
    return [Recipe("Ulysses", step, (weights, tokens), expert)]


if __name__ == "__main__":
    show(recipes())
