"""Expert parallelism without a capacity: tokens sorted by expert, and `ragged_dot`.

By hand, every token travels to its expert's device and back, and the gradient of the result to
the expert again.
"""

import jax
import jax.numpy as jnp

import gshard
from examples.recipes.recipe import D, Recipe, all_reduce, all_to_all, show
from examples.recipes.transformer import SMALL, Size


def experts(x_TM, router_ME, up_EMF, down_EFM):
    """Each token through the expert that its router chose."""
    gates_TE = jax.nn.softmax(x_TM @ router_ME)
    expert_T = jnp.argmax(gates_TE, -1)
    order_T = jnp.argsort(expert_T)
    counts_E = jnp.bincount(expert_T, length=router_ME.shape[1])
    hidden = jax.nn.gelu(jax.lax.ragged_dot(x_TM[order_T], up_EMF, counts_E))
    y_TM = jax.lax.ragged_dot(hidden, down_EFM, counts_E)
    return jnp.zeros_like(x_TM).at[order_T].set(y_TM) * jnp.max(gates_TE, -1, keepdims=True)


def step(x, router, up, down):
    x, up, down = (gshard.split(a, 0, D) for a in (x, up, down))

    def loss(weights):
        return jnp.mean((experts(x, *weights) - x) ** 2)

    value, grads = jax.value_and_grad(loss)((router, up, down))
    return [w - 1e-3 * g for w, g in zip((router, up, down), grads, strict=True)], value


def recipes(size: Size = SMALL) -> list[Recipe]:
    T, M, F = size.B * size.S, size.M, size.F
    shapes = [(T, M), (M, D), (D, M, F), (D, F, M)]
    arguments = tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)
    # There, back, and the gradients there; the router's gradient; the loss.
    expert = 3 * all_to_all(T // D * M * 4) + all_reduce(M * D * 4) + all_reduce(4)
    return [Recipe("dropless experts, ragged_dot", step, arguments, expert)]


if __name__ == "__main__":
    show(recipes())
