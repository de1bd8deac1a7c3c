"""A pipeline: each device is a stage, and microbatches roll from stage to stage in a loop.

Every tick all stages work on different microbatches, and hand their results on: one permute each
way. The last stage's results are the outputs; errors are taken in every stage and kept of the last,
so that the outputs need not be sent to all.
"""

import jax
import jax.numpy as jnp

import gshard
from examples.recipes.recipe import D, Recipe, all_reduce, show
from examples.recipes.transformer import SMALL, Size

MICROBATCHES = 16


def run(weights_NMM, x_TBM):
    """The microbatches, T of them, through all N stages."""
    stages = len(weights_NMM)
    x_TBM = jnp.concatenate([x_TBM, jnp.zeros((stages - 1, *x_TBM.shape[1:]), x_TBM.dtype)])

    def tick(state_NBM, x_BM):
        state_NBM = jnp.roll(state_NBM, 1, 0).at[0].set(x_BM)
        state_NBM = gshard.split(state_NBM, 0, D)
        state_NBM = jnp.tanh(jnp.einsum("NBM,NMK->NBK", state_NBM, weights_NMM))
        return state_NBM, state_NBM

    nothing = gshard.split(jnp.zeros((stages, *x_TBM.shape[1:]), x_TBM.dtype), 0, D)
    _, states_TNBM = jax.lax.scan(tick, nothing, x_TBM)
    return states_TNBM[stages - 1 :]  # as soon as something has arrived at the last stage


def step(weights, x, targets):
    weights = gshard.split(weights, 0, D)

    def loss(weights):
        errors_TN = jnp.mean((run(weights, x) - targets[:, None]) ** 2, (2, 3))
        return jnp.mean(errors_TN[:, -1])  # every stage has errors, the last one has the outputs

    value, grads = jax.value_and_grad(loss)(weights)
    return weights - 1e-3 * grads, value


def recipes(size: Size = SMALL) -> list[Recipe]:
    B, M = (8, 128) if size.M < 1024 else (64, 4096)
    f32 = jnp.float32
    batches = jax.ShapeDtypeStruct((MICROBATCHES, B, M), f32)
    weights = jax.ShapeDtypeStruct((D, M, M), f32)
    permute = B * M * 4
    # A permute each way for every tick; the outputs stay where they are, the error is told to all.
    expert = 2 * (MICROBATCHES + D - 1) * permute + all_reduce(4)
    return [Recipe("pipeline, 8 stages", step, (weights, batches, batches), expert)]


if __name__ == "__main__":
    show(recipes())
