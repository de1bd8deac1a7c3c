"""Bags of embeddings: a table split by its rows, of which weighted sums are taken.

Each device sums the rows that it has, and the sums are reduced: never the rows.
"""

import jax
import jax.numpy as jnp

import gshard
from examples.recipes.recipe import D, Recipe, all_gather, all_reduce, reduce_scatter, show
from examples.recipes.transformer import SMALL, Size

IN_A_BAG = 16


def loss(weights, rows_BK, weights_BK, target_BM):
    bags_BM = (weights["table"][rows_BK] * weights_BK[..., None]).sum(1)
    return jnp.mean((jnp.tanh(bags_BM @ weights["dense"]) - target_BM) ** 2)


def step(weights, *batch):
    weights = {
        "table": gshard.split(weights["table"], 0, D),
        "dense": gshard.replicate(weights["dense"]),
    }
    batch = [gshard.split(x, 0, D) for x in batch]
    value, grads = jax.value_and_grad(loss)(weights, *batch)
    return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, grads), value


def recipes(size: Size = SMALL) -> list[Recipe]:
    V, M, B, K = 64 * size.V, size.M, size.B * size.S // 8, IN_A_BAG
    weights = {
        "table": jax.ShapeDtypeStruct((V, M), jnp.float32),
        "dense": jax.ShapeDtypeStruct((M, M), jnp.float32),
    }
    batch = [jax.ShapeDtypeStruct((B, K), t) for t in (jnp.int32, jnp.float32)]
    batch.append(jax.ShapeDtypeStruct((B, M), jnp.float32))
    # Rows' numbers and weights to all tables, the bags back, and their gradients to the tables.
    expert = 2 * all_gather(B * K * 4) + reduce_scatter(B * M * 4) + all_gather(B * M * 4)
    expert += all_reduce(M * M * 4) + all_reduce(4)
    return [Recipe("bags of embeddings", step, (weights, *batch), expert)]


if __name__ == "__main__":
    show(recipes())
