"""FSDP (ZeRO-3): the batch is split, and so is every weight; weights are gathered for their use.

A weight travels twice: gathered before its use (and again for the backward pass, where the
gathered weight was not kept), its gradient summed and scattered after it.
"""

import jax

import gshard
from examples.recipes.recipe import D, Recipe, all_gather, all_reduce, nbytes, reduce_scatter, show
from examples.recipes.transformer import (
    SMALL,
    Size,
    loss,
    remat_loss,
    sgd,
    shapes,
    stacked,
    tokens,
)  # fmt: skip


def split_all(params):
    return jax.tree.map(lambda w: gshard.split(w, 0, D), params)


def step(params, batch, loss=loss):
    params, batch = split_all(params), gshard.split(batch, 0, D)
    params, value = sgd(params, batch, loss)
    return split_all(params), value


def step_in_scan(params, batch):
    def split(params):  # the first dim of a stack is the loop's
        layers = jax.tree.map(lambda w: gshard.split(w, 1, D), params["layers"])
        return split_all(params | {"layers": []}) | {"layers": layers}

    params, value = sgd(split(params), gshard.split(batch, 0, D), remat_loss)
    return split(params), value


def step_with_remat(params, batch):
    return step(params, batch, remat_loss)


def step_with_activations(params, batch):
    def between(x):
        return gshard.split(x, 0, D)

    return step(params, batch, lambda params, batch: loss(params, batch, between=between))


def recipes(size: Size = SMALL) -> list[Recipe]:
    params, batch = shapes(size), tokens(size)
    moved = reduce_scatter(nbytes(params)) + all_gather(nbytes(params)) + all_reduce(4)
    again = all_gather(nbytes(params["layers"]))
    # What is looked up in the table, if that is less than the table, and so is its gradient.
    looked_up = 2 * all_gather(min(nbytes(params["embed"]), size.stream) - nbytes(params["embed"]))
    once, twice = moved + looked_up, moved + again + looked_up
    return [
        Recipe("FSDP", step, (params, batch), once),
        Recipe("… with remat", step_with_remat, (params, batch), twice),
        Recipe("… with remat, layers in scan", step_in_scan, (stacked(params), batch), twice),
        Recipe("… activations annotated too", step_with_activations, (params, batch), once),
    ]


if __name__ == "__main__":
    show(recipes())
