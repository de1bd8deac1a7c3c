"""Muon and Shampoo under FSDP: what they compute of entire matrices, one device for each matrix.

Nothing says so: weights, momenta and statistics are annotated as under FSDP with any optimizer. The
equal computations of all weights are found, stacked and dealt out to the devices: a device sends
its rows of the matrices to the matrices' devices, and gets its rows of the results back.
"""

import jax
import jax.numpy as jnp
import optax

import gshard
from examples.recipes.recipe import D, Recipe, all_reduce, all_to_all, fully_sharded, nbytes, show
from examples.recipes.transformer import SMALL, Size

MUON = optax.contrib.muon(1e-3)


def loss(weights, x_BM):
    y_BM = x_BM
    for up_MF, down_FM in weights:
        y_BM = y_BM + jax.nn.relu(y_BM @ up_MF) @ down_FM
    return jnp.mean((y_BM - x_BM) ** 2)


def fsdp(tree):
    return jax.tree.map(lambda x: gshard.split(x, 0, D) if jnp.ndim(x) == 2 else x, tree)


def muon(weights, state, x_BM):
    """`optax.contrib.muon` as it is."""
    weights, state = fsdp(weights), fsdp(state)
    value, grads = jax.value_and_grad(loss)(weights, gshard.split(x_BM, 0, D))
    updates, state = MUON.update(grads, state, weights)
    return fsdp(optax.apply_updates(weights, updates)), fsdp(state), value


def root(statistic_NN):
    """Its inverse fourth root."""
    values_N, vectors_NN = jnp.linalg.eigh(statistic_NN + 1e-2 * jnp.eye(len(statistic_NN)))
    return (vectors_NN * jnp.maximum(values_N, 1e-2) ** -0.25) @ vectors_NN.T


def shampoo(weights, state, x_BM):
    """Gradients between the roots of their statistics, as Shampoo has them."""
    weights, state = fsdp(weights), fsdp(state)
    value, grads = jax.value_and_grad(loss)(weights, gshard.split(x_BM, 0, D))

    def updated(w, g, statistics):
        left, right = statistics
        left, right = 0.9 * left + g @ g.T, 0.9 * right + g.T @ g
        return w - 1e-3 * root(left) @ g @ root(right), (left, right)

    both = [[updated(*each) for each in zip(*pair, strict=True)]
            for pair in zip(weights, grads, state, strict=True)]  # fmt: skip
    weights = [tuple(w for w, _ in pair) for pair in both]
    return fsdp(weights), fsdp([tuple(s for _, s in pair) for pair in both]), value


def recipes(size: Size = SMALL) -> list[Recipe]:
    L, M, F, B = D, size.M, 2 * size.M, size.B * size.S
    weights = [
        (jax.ShapeDtypeStruct((M, F), jnp.float32), jax.ShapeDtypeStruct((F, M), jnp.float32))
    ] * L
    statistics = [
        tuple(tuple(jax.ShapeDtypeStruct((n, n), jnp.float32) for n in w.shape) for w in pair)
        for pair in weights
    ]
    batch = jax.ShapeDtypeStruct((B, M), jnp.float32)
    shared = fully_sharded(nbytes(weights)) + all_reduce(4)
    rows = all_to_all(nbytes(weights) / D)
    # Momenta to the matrices' devices, and changes back. Shampoo's gradients are summed where they
    # are needed: its statistics go there, and come back with the changes.
    return [
        Recipe("Muon (Optax) under FSDP", muon,
               (weights, jax.eval_shape(MUON.init, weights), batch), shared + 2 * rows),
        Recipe("Shampoo under FSDP", shampoo, (weights, statistics, batch),
               shared + rows + 2 * all_to_all(nbytes(statistics) / D)),
    ]  # fmt: skip


if __name__ == "__main__":
    show(recipes())
