"""HSDP: FSDP within groups of devices, data parallelism across them.

Weights are gathered within the group; gradients are scattered within it and summed across.
"""

import jax
import numpy as np

import gshard
from examples.recipes.recipe import Recipe, all_gather, all_reduce, nbytes, reduce_scatter, show
from examples.recipes.transformer import SMALL, Size, sgd, shapes, tokens

MESH = np.arange(8).reshape(2, 4)  # 2 groups of 4


def split_within(params):
    def split(w):
        return gshard.shard(w, MESH[:1].reshape(-1, *[1] * (w.ndim - 1)))

    return jax.tree.map(split, params)


def step(params, batch):
    params, batch = split_within(params), gshard.split(batch, 0, MESH.size)
    params, value = sgd(params, batch)
    return split_within(params), value


def recipes(size: Size = SMALL) -> list[Recipe]:
    params = shapes(size)
    n, table = nbytes(params), nbytes(params["embed"])
    within = all_gather(n, 4) + reduce_scatter(n, 4)
    looked_up = 2 * all_gather(min(table, size.stream / 2) - table, 4)
    expert = within + looked_up + all_reduce(n / 4, 2) + all_reduce(4)
    return [Recipe("HSDP 2 x 4", step, (params, tokens(size)), expert)]


if __name__ == "__main__":
    show(recipes())
