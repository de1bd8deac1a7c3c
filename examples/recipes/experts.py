"""Expert parallelism with one-hot dispatch: the paper's MoE layer, in training.

Tokens are split by group, experts by number: two AllToAlls forwards, and one backwards, for the
gradients of the outputs (those of the tokens are not needed).
"""

import jax

from examples.moe_layer import moe_loss, shapes
from examples.recipes.recipe import D, Recipe, all_reduce, all_to_all, show
from examples.recipes.transformer import SMALL, Size


def step(x, *weights):
    def loss(weights):
        return moe_loss(x, *weights, devices=D)

    value, grads = jax.value_and_grad(loss)(weights)
    return [w - 1e-3 * g for w, g in zip(weights, grads, strict=True)], value


def recipes(size: Size = SMALL) -> list[Recipe]:
    S, M, H = (256, 128, 512) if size.M < 1024 else (4096, 1024, 8192)
    capacity = 2 * S // D
    exchanged = D * capacity * M * 4  # what a device dispatches: [E, 1, C, M]
    # The gradient for the router, and two scalars: the loss and the balance of the load.
    expert = 3 * all_to_all(exchanged) + all_reduce(M * D * 4) + 2 * all_reduce(4)
    return [Recipe("expert parallel, one-hot", step, tuple(shapes(D, S, M, H)), expert)]


if __name__ == "__main__":
    show(recipes())
