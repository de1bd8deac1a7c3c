"""Fourier layers: fields too large for a device, cut into strips and filtered by frequency.

A transform takes one AllToAll: rows are whole, then columns are. The inverse takes it back.
"""

import jax
import jax.numpy as jnp

import gshard
from examples.recipes.recipe import D, Recipe, all_reduce, all_to_all, show
from examples.recipes.transformer import SMALL, Size

LAYERS = 2


def loss(filters, x_BHW):
    for filter_HW in filters:
        x_BHW = jnp.tanh(jnp.fft.irfft2(jnp.fft.rfft2(x_BHW) * filter_HW))
    return jnp.mean(x_BHW**2)


def step(filters, x_BHW):
    value, grads = jax.value_and_grad(loss)(filters, gshard.split(x_BHW, 1, D))
    return [w - 1e-3 * g for w, g in zip(filters, grads, strict=True)], value


def recipes(size: Size = SMALL) -> list[Recipe]:
    B, H, W = (4, 128, 254) if size.M < 1024 else (8, 4096, 8190)
    columns = W // 2 + 1
    filters = [jax.ShapeDtypeStruct((H, columns), jnp.float32)] * LAYERS
    spectrum = B * H * columns * 8 / D
    # There and back in every layer and in its gradient, but for that of the fields.
    expert = (4 * LAYERS - 1) * all_to_all(spectrum) + all_reduce(4)
    fields = jax.ShapeDtypeStruct((B, H, W), jnp.float32)
    return [Recipe("Fourier layers", step, (filters, fields), expert)]


if __name__ == "__main__":
    show(recipes())
