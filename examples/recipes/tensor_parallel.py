"""Tensor parallelism (Megatron): heads, hidden units and the vocabulary are split.

Two AllReduces of the activations for each layer, and two in its backward pass.
"""

import gshard
from examples.recipes.recipe import D, Recipe, all_reduce, show
from examples.recipes.transformer import SMALL, Size, loss, sgd, shapes, tokens

SPLIT = {"q": 1, "k": 1, "v": 1, "out": 0, "up": 1, "down": 0}  # the dim of each weight


def split_heads_and_hidden(params):
    def layer(weights):
        return {n: gshard.split(w, SPLIT[n], D) if n in SPLIT else w for n, w in weights.items()}

    return params | {
        "embed": gshard.split(params["embed"], 0, D),
        "layers": [layer(weights) for weights in params["layers"]],
        "head": gshard.split(params["head"], 1, D),
    }


def step(params, batch, loss=loss):
    params, value = sgd(split_heads_and_hidden(params), gshard.replicate(batch), loss)
    return split_heads_and_hidden(params), value


def expert(size: Size) -> float:
    # Two each way in every layer; what is looked up in the table; before the head, backwards.
    activations = (4 * size.L + 2) * all_reduce(size.stream)
    # The softmax over the split vocabulary: its maximum, its sum and the target's logit.
    return activations + 3 * all_reduce(size.B * size.S * 4)


def recipes(size: Size = SMALL) -> list[Recipe]:
    size = size.few_tokens()
    return [Recipe("tensor parallel", step, (shapes(size), tokens(size)), expert(size))]


if __name__ == "__main__":
    show(recipes())
