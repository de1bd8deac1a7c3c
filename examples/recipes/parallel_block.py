"""Transformer blocks whose attention and hidden layer read the same input, tensor parallel.

As in GPT-J and PaLM. Their outputs are added before the devices' parts are: one AllReduce a layer,
and one backwards.
"""

import functools

import jax

from examples.recipes.recipe import Recipe, all_reduce, show
from examples.recipes.tensor_parallel import step
from examples.recipes.transformer import SMALL, Size, attention, loss, norm, shapes, tokens


def block(x_BSM, layer):
    y_BSM = norm(x_BSM, layer["norm1"])
    hidden = jax.nn.gelu(y_BSM @ layer["up"])
    return x_BSM + attention(y_BSM, layer) + hidden @ layer["down"]


parallel_loss = functools.partial(loss, block=block)


def parallel_step(params, batch):
    return step(params, batch, parallel_loss)


def recipes(size: Size = SMALL) -> list[Recipe]:
    size = size.few_tokens()
    # One each way in every layer; what is looked up in the table; before the head, backwards.
    activations = (2 * size.L + 2) * all_reduce(size.stream)
    # The softmax over the split vocabulary: its maximum, its sum and the target's logit.
    expert = activations + 3 * all_reduce(size.B * size.S * 4)
    params = shapes(size)
    for layer in params["layers"]:
        del layer["norm2"]
    arguments = (params, tokens(size))
    return [Recipe("parallel block, tensor parallel", parallel_step, arguments, expert)]


if __name__ == "__main__":
    show(recipes())
