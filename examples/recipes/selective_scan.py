"""A layer with a recurrence h = a * h + u over time (Mamba), its positions split, with gradients.

`lax.associative_scan` computes all states at once. A device needs the states before its tile: the
products and sums of every tile are gathered, and the sums of the gradients.
"""

import jax
import jax.numpy as jnp
from jax import lax

import gshard
from examples.recipes.recipe import D, Recipe, all_gather, all_reduce, nbytes, show
from examples.recipes.transformer import SMALL, Size


def combine(before, after):
    return before[0] * after[0], after[0] * before[1] + after[1]


def loss(weights, x_TM, y_TM):
    a_TN = jax.nn.sigmoid(x_TM @ weights["keep"])
    u_TN = (1 - a_TN) * (x_TM @ weights["enter"])
    _, h_TN = lax.associative_scan(combine, (a_TN, u_TN))
    return jnp.mean((h_TN @ weights["leave"] - y_TM) ** 2)


def step(weights, x_TM, y_TM):
    halves = (gshard.split(a, 0, D) for a in (x_TM, y_TM))
    value, grads = jax.value_and_grad(loss)(weights, *halves)
    return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, grads), value


def recipes(size: Size = SMALL) -> list[Recipe]:
    T, M, N = (1024, 64, 128) if size.M < 1024 else (65536, 1024, 2048)
    sizes = {"keep": (M, N), "enter": (M, N), "leave": (N, M)}
    weights = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in sizes.items()}
    batch = jax.ShapeDtypeStruct((T, M), jnp.float32)
    # Two rows of each tile, and one for the gradients; the weights' gradients and the loss.
    expert = 3 * all_gather(4 * D * N) + all_reduce(nbytes(weights) + 4)
    return [Recipe("selective scan", step, (weights, batch, batch), expert)]


if __name__ == "__main__":
    show(recipes())
