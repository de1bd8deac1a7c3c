"""Data parallelism over a batch that does not fit: its parts one after another, in a loop.

Each device adds up the gradients of its own examples; their sum over the devices is taken once,
after the loop.
"""

import jax
import jax.numpy as jnp

import gshard
from examples.recipes.recipe import D, Recipe, all_reduce, nbytes, show
from examples.recipes.transformer import SMALL, Size, loss, shapes, tokens

PARTS = 4


def step(params, batches):
    def add(total, batch):
        batch = gshard.split(batch, 0, D)
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(jnp.add, total, (value, grads)), None

    nothing = jax.tree.map(jnp.zeros_like, (jnp.zeros(()), params))
    (value, grads), _ = jax.lax.scan(add, nothing, batches)
    return jax.tree.map(lambda w, g: w - 1e-3 * g / PARTS, params, grads), value / PARTS


def recipes(size: Size = SMALL) -> list[Recipe]:
    params, batch = shapes(size), tokens(size)
    batches = jax.ShapeDtypeStruct((PARTS, *batch.shape), batch.dtype)
    expert = all_reduce(nbytes(params)) + all_reduce(4)
    return [Recipe("data parallel, gradient accumulation", step, (params, batches), expert)]


if __name__ == "__main__":
    show(recipes())
