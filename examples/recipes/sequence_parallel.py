"""Sequence parallelism: tensor parallelism whose activations are split between the layers.

Each AllReduce becomes a ReduceScatter and an AllGather of the same bytes; norms and residuals
take an eighth of the memory and of the work.
"""

import gshard
from examples.recipes import tensor_parallel
from examples.recipes.recipe import D, Recipe, all_reduce, nbytes, show
from examples.recipes.transformer import SMALL, Size, block, loss, shapes, tokens


def step(params, batch):
    def between(x):
        return gshard.split(x, 1, D)

    def split_loss(params, batch):
        return loss(params, batch, block, between)

    return tensor_parallel.step(params, batch, split_loss)


def recipes(size: Size = SMALL) -> list[Recipe]:
    size = size.few_tokens()
    params = shapes(size)
    scales = [params["norm"], *([layer["norm1"], layer["norm2"]] for layer in params["layers"])]
    expert = tensor_parallel.expert(size) + all_reduce(nbytes(scales))  # their gradients
    return [Recipe("sequence parallel", step, (params, tokens(size)), expert)]


if __name__ == "__main__":
    show(recipes())
