"""ZeRO-1: data parallelism with the optimizer's state split over the devices.

Each device updates its part of the weights: it needs the sum of that part's gradients alone
(ReduceScatter), and gives its new weights to all (AllGather).
"""

import jax

import gshard
from examples.recipes.recipe import D, Recipe, all_gather, all_reduce, nbytes, reduce_scatter, show
from examples.recipes.transformer import SMALL, Size, adam, loss, shapes, tokens


def split_all(tree):
    return jax.tree.map(lambda x: gshard.split(x, 0, D), tree)


def step(params, moments, batch):
    batch, moments = gshard.split(batch, 0, D), split_all(moments)
    params = jax.tree.map(gshard.replicate, params)
    value, grads = jax.value_and_grad(loss)(params, batch)
    params, moments = adam(params, moments, split_all(grads))
    return jax.tree.map(gshard.replicate, params), split_all(moments), value


def recipes(size: Size = SMALL) -> list[Recipe]:
    params = shapes(size)
    expert = reduce_scatter(nbytes(params)) + all_gather(nbytes(params)) + all_reduce(4)
    return [Recipe("ZeRO-1", step, (params, (params, params), tokens(size)), expert)]


if __name__ == "__main__":
    show(recipes())
