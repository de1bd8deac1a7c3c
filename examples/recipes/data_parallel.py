"""Data parallelism: the batch is split, every device has all weights and adds its gradients.

One annotation. The gradients of all weights are summed over the devices: one AllReduce each.
"""

import jax

import gshard
from examples.recipes.recipe import D, Recipe, all_reduce, nbytes, show
from examples.recipes.transformer import SMALL, Size, adam, loss, shapes, stacked, tokens


def step(params, moments, batch):
    batch = gshard.split(batch, 0, D)
    value, grads = jax.value_and_grad(loss)(params, batch)
    params, moments = adam(params, moments, grads)
    return params, moments, value


def recipes(size: Size = SMALL) -> list[Recipe]:
    params, batch = shapes(size), tokens(size)
    expert = all_reduce(nbytes(params)) + all_reduce(4)  # and the loss
    in_scan = stacked(params)
    return [
        Recipe("data parallel, Adam", step, (params, (params, params), batch), expert),
        Recipe("… layers in scan", step, (in_scan, (in_scan, in_scan), batch), expert),
    ]


if __name__ == "__main__":
    show(recipes())
