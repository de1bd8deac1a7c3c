"""Context parallelism: every sequence is split over the devices, for contexts that are long.

Everything but attention needs its own tokens alone. Queries stay; keys and values are gathered,
and their gradients are summed and scattered. Where they do not fit (`memory_limit`), they go round
in a ring instead, and so do their gradients: 1.4 times the bytes, an eighth of the memory.
"""

import jax

import gshard
from examples.recipes.recipe import D, Recipe, all_gather, all_reduce, nbytes, reduce_scatter, show
from examples.recipes.transformer import SMALL, Size, loss, sgd, shapes, tokens


def step(params, batch):
    params = jax.tree.map(gshard.replicate, params)

    def between(x):
        return gshard.split(x, 1, D)

    params, value = sgd(params, batch, lambda params, batch: loss(params, batch, between=between))
    return jax.tree.map(gshard.replicate, params), value


def recipes(size: Size = SMALL) -> list[Recipe]:
    params = shapes(size)
    keys_and_values = 2 * (all_gather(size.stream) + reduce_scatter(size.stream))
    expert = size.L * keys_and_values + all_reduce(nbytes(params)) + all_reduce(4)
    return [Recipe("context parallel", step, (params, tokens(size)), expert)]


if __name__ == "__main__":
    show(recipes())
    print("where keys do not fit:")
    show(recipes(), memory_limit=2**18)
