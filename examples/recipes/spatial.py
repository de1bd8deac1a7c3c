"""Spatial partitioning: images cut into strips, for those that do not fit on a device.

Every convolution of 3 columns needs one column of each neighbour, in both passes.
"""

import jax
import jax.numpy as jnp
from jax import lax

import gshard
from examples.recipes.recipe import D, Recipe, all_reduce, nbytes, show
from examples.recipes.transformer import SMALL, Size

LAYERS = 4


def loss(kernels, x_BHWC):
    for kernel in kernels:
        numbers = ("NHWC", "HWIO", "NHWC")
        y = lax.conv_general_dilated(x_BHWC, kernel, (1, 1), "SAME", dimension_numbers=numbers)
        x_BHWC = jax.nn.relu(y)
    return jnp.mean(x_BHWC**2)


def step(kernels, x_BHWC):
    x_BHWC = gshard.split(x_BHWC, 2, D)
    value, grads = jax.value_and_grad(loss)(kernels, x_BHWC)
    return [w - 1e-3 * g for w, g in zip(kernels, grads, strict=True)], value


def recipes(size: Size = SMALL) -> list[Recipe]:
    B, H, W, C = (4, 64, 256, 16) if size.M < 1024 else (8, 1024, 4096, 64)
    kernels = [jax.ShapeDtypeStruct((3, 3, C, C), jnp.float32)] * LAYERS
    column = B * H * C * 4
    # Two columns for every convolution, and two for every gradient but that of the images.
    expert = 2 * column * (2 * LAYERS - 1) + all_reduce(nbytes(kernels)) + all_reduce(4)
    images = jax.ShapeDtypeStruct((B, H, W, C), jnp.float32)
    return [Recipe("spatial convolutions", step, (kernels, images), expert)]


if __name__ == "__main__":
    show(recipes())
