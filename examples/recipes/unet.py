"""A U-Net on images cut into strips, forwards: convolutions, pooling, rows repeated on the way up.

Every convolution of 3 rows needs one row of each neighbour; one of repeated rows needs them before
they are repeated, when they are half as wide.
"""

import itertools

import jax
import jax.numpy as jnp
from jax import lax

import gshard
from examples.recipes.recipe import D, Recipe, show
from examples.recipes.transformer import SMALL, Size

LEVELS = 2


def conv(x_BHWC, kernel):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x_BHWC, kernel, (1, 1), "SAME", dimension_numbers=numbers)


def forward(kernels, x_BHWC):
    x_BHWC = gshard.split(x_BHWC, 1, D)
    skipped = []
    for kernel in kernels["down"]:
        x_BHWC = jax.nn.relu(conv(x_BHWC, kernel))
        skipped.append(x_BHWC)
        x_BHWC = lax.reduce_window(x_BHWC, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x_BHWC = jax.nn.relu(conv(x_BHWC, kernels["middle"]))
    for kernel, skip in zip(kernels["up"], reversed(skipped), strict=True):
        x_BHWC = jnp.repeat(jnp.repeat(x_BHWC, 2, axis=1), 2, axis=2)
        x_BHWC = jax.nn.relu(conv(jnp.concatenate([x_BHWC, skip], -1), kernel))
    return x_BHWC


def recipes(size: Size = SMALL) -> list[Recipe]:
    B, H, W, C = (2, 128, 128, 8) if size.M < 1024 else (8, 2048, 2048, 64)

    def kernel(n, m):
        return jax.ShapeDtypeStruct((3, 3, n, m), jnp.float32)

    channels = [C * 2**level for level in range(LEVELS + 1)]
    kernels = {
        "down": [kernel(n, m) for n, m in zip([C, *channels], channels[:-1], strict=False)],
        "middle": kernel(channels[-2], channels[-1]),
        "up": [kernel(m + n, n) for n, m in itertools.pairwise(channels)][::-1],
    }
    rows = [B * (W >> level) * 4 for level in range(LEVELS + 1)]  # bytes of a row of one channel
    down = sum(row * k.shape[2] for row, k in zip(rows, kernels["down"], strict=False))
    middle = rows[-1] * channels[-2]
    # What comes from below travels before it is repeated; what skipped the levels travels as it is.
    up = sum(rows[i + 1] * channels[i + 1] + rows[i] * channels[i] for i in range(LEVELS))
    images = jax.ShapeDtypeStruct((B, H, W, C), jnp.float32)
    expert = 2 * (down + middle + up)
    return [Recipe("U-Net, forwards", forward, (kernels, images), expert)]


if __name__ == "__main__":
    show(recipes())
