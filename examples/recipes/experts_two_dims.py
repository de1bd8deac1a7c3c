"""16 experts on a mesh of 2 x 4: experts along one axis, four to a device, tokens along both.

Within its half of the mesh, each device sends its tokens to the experts' devices and back.
"""

import jax
import jax.numpy as jnp
import numpy as np

import gshard
from examples.moe_layer import top2_gating
from examples.recipes.recipe import D, Recipe, all_reduce, all_to_all, nbytes, show
from examples.recipes.transformer import SMALL, Size

EXPERTS = 16
MESH = np.arange(D).reshape(2, 4)


def layer(x_GSM, wg_ME, wi_EMH, wo_EHM):
    gates_GSE = jax.nn.softmax(jnp.einsum("GSM,ME->GSE", x_GSM, wg_ME))
    combine_GSEC, aux = top2_gating(gates_GSE, 2 * x_GSM.shape[1] // EXPERTS)
    mask_GSEC = (combine_GSEC > 0).astype(x_GSM.dtype)
    inputs_EGCM = jnp.einsum("GSEC,GSM->EGCM", mask_GSEC, x_GSM)
    h_EGCH = jax.nn.relu(jnp.einsum("EGCM,EMH->EGCH", inputs_EGCM, wi_EMH))
    outputs_EGCM = jnp.einsum("EGCH,EHM->EGCM", h_EGCH, wo_EHM)
    return jnp.einsum("GSEC,EGCM->GSM", combine_GSEC, outputs_EGCM), aux


def loss(weights, x_GSM):
    y_GSM, aux = layer(x_GSM, *weights)
    return jnp.mean((y_GSM - x_GSM) ** 2) + 0.01 * aux


def step(weights, x_GSM):
    wg_ME, *experts = weights
    by_expert = MESH[:1].reshape(-1, 1, 1)  # and copies along the mesh's first axis
    weights = [gshard.replicate(wg_ME), *(gshard.shard(w, by_expert) for w in experts)]
    value, grads = jax.value_and_grad(loss)(weights, gshard.split(x_GSM, 0, MESH.size))
    return [w - 1e-3 * g for w, g in zip(weights, grads, strict=True)], value


def recipes(size: Size = SMALL) -> list[Recipe]:
    G, S, M, H = (16, 256, 64, 256) if size.M < 1024 else (64, 2048, 1024, 4096)
    shapes = [(M, EXPERTS), (EXPERTS, M, H), (EXPERTS, H, M)]
    weights = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    exchanged = EXPERTS * (G // D) * (2 * S // EXPERTS) * M * 4  # what a device dispatches
    # To the experts, back, and backwards again for the gradients of the outputs; the gradients of a
    # device's experts, with the other half of the mesh; the router's, the loss and the balance.
    expert = 3 * all_to_all(exchanged, 4) + all_reduce(nbytes(weights[1:]) / 4, 2)
    expert += all_reduce(nbytes(weights[0])) + 2 * all_reduce(4)
    tokens = jax.ShapeDtypeStruct((G, S, M), jnp.float32)
    return [Recipe("16 experts on 2 x 4", step, (weights, tokens), expert)]


if __name__ == "__main__":
    show(recipes())
