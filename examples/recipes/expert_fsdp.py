"""Experts on a mesh of their own, under FSDP: dense weights over all devices, experts over some.

Four annotations: tokens and dense weights over all devices, experts along one axis of a 2 x 4 mesh,
and the model dim of their weights along the other. Tokens go to the experts within a row of the
mesh, an expert's weights are gathered within a column, and dense weights from everywhere.
"""

import jax
import jax.numpy as jnp

import gshard
from examples.recipes.experts_two_dims import EXPERTS, MESH, layer
from examples.recipes.recipe import D, Recipe, all_reduce, all_to_all, fully_sharded, nbytes, show
from examples.recipes.transformer import SMALL, Size


def loss(weights, x_GSM):
    dense_MM, experts = weights
    y_GSM, aux = layer(x_GSM + jnp.tanh(x_GSM @ dense_MM), *experts)
    return jnp.mean((y_GSM - x_GSM) ** 2) + 0.01 * aux


def step(weights, x_GSM):
    dense_MM, (wg_ME, wi_EMH, wo_EHM) = weights
    weights = (
        gshard.split(dense_MM, 0, MESH.size),
        [
            gshard.replicate(wg_ME),
            gshard.shard(wi_EMH, MESH.T.reshape(4, 2, 1)),
            gshard.shard(wo_EHM, MESH.T.reshape(4, 1, 2)),
        ],
    )
    value, grads = jax.value_and_grad(loss)(weights, gshard.split(x_GSM, 0, MESH.size))
    return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, grads), value


def recipes(size: Size = SMALL) -> list[Recipe]:
    G, S, M, H = (16, 256, 64, 256) if size.M < 1024 else (64, 2048, 1024, 4096)
    shapes = [(M, EXPERTS), (EXPERTS, M, H), (EXPERTS, H, M)]
    experts = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    dense = jax.ShapeDtypeStruct((M, M), jnp.float32)
    tokens = jax.ShapeDtypeStruct((G, S, M), jnp.float32)
    exchanged = EXPERTS * (G // D) * (2 * S // EXPERTS) * M * 4  # what a device dispatches
    # Dense weights and their gradients; a device's experts and theirs, within a column; tokens to
    # the experts, back, and gradients both ways but one; the router's, the loss and the balance.
    expert = fully_sharded(nbytes(dense)) + fully_sharded(nbytes(experts[1:]) / 4, 2)
    expert += 4 * all_to_all(exchanged, 4)
    expert += all_reduce(nbytes(experts[0])) + 2 * all_reduce(4)
    return [Recipe("experts 4 x FSDP 2, dense FSDP 8", step, ((dense, experts), tokens), expert)]


if __name__ == "__main__":
    show(recipes())
