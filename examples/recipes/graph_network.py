"""A graph network whose edges are split: every device has all nodes, and some of the edges.

A node hears from its neighbours along both directions of an edge: one AllReduce of the sums a
layer, and one of their gradients.
"""

import jax
import jax.numpy as jnp

import gshard
from examples.recipes.recipe import D, Recipe, all_reduce, nbytes, show
from examples.recipes.transformer import SMALL, Size

LAYERS = 3


def layer(nodes_NM, senders_E, receivers_E, weights):
    along_EM = jnp.tanh(nodes_NM[senders_E] @ weights["along"])
    against_EM = jnp.tanh(nodes_NM[receivers_E] @ weights["against"])
    heard_NM = jnp.zeros_like(nodes_NM).at[receivers_E].add(along_EM)
    heard_NM = heard_NM.at[senders_E].add(against_EM)
    return nodes_NM + jnp.tanh(heard_NM @ weights["out"])


def loss(params, nodes_NM, senders_E, receivers_E):
    for weights in params:
        nodes_NM = layer(nodes_NM, senders_E, receivers_E, weights)
    return jnp.mean(nodes_NM**2)


def step(params, nodes_NM, senders_E, receivers_E):
    edges = gshard.split(senders_E, 0, D), gshard.split(receivers_E, 0, D)
    params = jax.tree.map(gshard.replicate, params)
    value, grads = jax.value_and_grad(loss)(params, gshard.replicate(nodes_NM), *edges)
    return jax.tree.map(lambda w, g: w - 1e-3 * g, params, grads), value


def recipes(size: Size = SMALL) -> list[Recipe]:
    N, E, M = (1024, 16384, 64) if size.M < 1024 else (65536, 4194304, 256)
    matrix = jax.ShapeDtypeStruct((M, M), jnp.float32)
    params = [{"along": matrix, "against": matrix, "out": matrix} for _ in range(LAYERS)]
    nodes = jax.ShapeDtypeStruct((N, M), jnp.float32)
    edges = [jax.ShapeDtypeStruct((E,), jnp.int32)] * 2
    # What nodes hear in each layer; the gradients of all nodes but the first; those of the weights
    # along edges (all devices have the sums that the others are made of).
    passes = (2 * LAYERS - 1) * all_reduce(nbytes(nodes))
    expert = passes + all_reduce(2 * LAYERS * nbytes(matrix))
    return [Recipe("graph network, edges split", step, (params, nodes, *edges), expert)]


if __name__ == "__main__":
    show(recipes())
