"""A ResNet on images that are cut into strips (appendix, "Convolution"), on 8 virtual devices.

One annotation on the images; the split travels through strided convolutions, pooling, batch
normalisation and the whole backward pass. Width 227 divides by nothing. Prints the loss with and
without partitioning, what each device sends, and how the memory of the activations shrinks.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.console import Console
from rich.table import Table

import gshard

CHANNELS = (8, 16, 24)
CLASSES = 10


def conv(x_NHWC, kernel_HWIO, stride=1):
    """A convolution with "SAME" padding."""
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x_NHWC, kernel_HWIO, (stride, stride), "SAME", dimension_numbers=numbers
    )


def norm(x_NHWC, scale_C, bias_C):
    """Batch normalisation: the statistics are sums over the split dims."""
    mean_C = jnp.mean(x_NHWC, (0, 1, 2))
    var_C = jnp.mean(x_NHWC**2, (0, 1, 2)) - mean_C**2
    return (x_NHWC - mean_C) * (scale_C * lax.rsqrt(var_C + 1e-5)) + bias_C


def block(x_NHWC, weights, stride):
    """Two convolutions and a shortcut."""
    h = jax.nn.relu(norm(conv(x_NHWC, weights["first"], stride), *weights["norm1"]))
    h = norm(conv(h, weights["second"]), *weights["norm2"])
    if "shortcut" in weights:
        x_NHWC = conv(x_NHWC, weights["shortcut"], stride)
    return jax.nn.relu(x_NHWC + h)


def resnet(weights, x_NHWC):
    """The logits of the images."""
    h = jax.nn.relu(norm(conv(x_NHWC, weights["stem"], 2), *weights["norm"]))
    h = lax.reduce_window(h, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    for number, stage in enumerate(weights["blocks"]):
        h = block(h, stage, 1 if number == 0 else 2)
    return jnp.mean(h, (1, 2)) @ weights["head"]


def init(key, channels=CHANNELS):
    """He-normal kernels."""
    keys = iter(jax.random.split(key, 32))

    def kernel(*shape):
        scale = np.sqrt(2 / np.prod(shape[:-1]))
        return jax.random.normal(next(keys), shape) * scale

    def affine(n):
        return jnp.ones(n), jnp.zeros(n)

    blocks = []
    for before, after in zip((channels[0], *channels), channels, strict=False):
        blocks.append(
            {
                "first": kernel(3, 3, before, after),
                "norm1": affine(after),
                "second": kernel(3, 3, after, after),
                "norm2": affine(after),
            }
        )
        if before != after:
            blocks[-1]["shortcut"] = kernel(1, 1, before, after)
    return {
        "stem": kernel(7, 7, 3, channels[0]),
        "norm": affine(channels[0]),
        "blocks": blocks,
        "head": kernel(channels[-1], CLASSES),
    }


def loss_fn(weights, x_NHWC, labels_N):
    """Cross entropy."""
    logits = jax.nn.log_softmax(resnet(weights, x_NHWC))
    return -jnp.mean(jnp.sum(logits * jax.nn.one_hot(labels_N, CLASSES), -1))


def train_step(weights, x_NHWC, labels_N, mesh=None, rate=0.05):
    """One step of gradient descent; `mesh` says how height and width are cut."""
    if mesh is not None:
        x_NHWC = gshard.shard(x_NHWC, np.asarray(mesh)[None, :, :, None])
        weights = jax.tree.map(gshard.replicate, weights)
    loss, grads = jax.value_and_grad(loss_fn)(weights, x_NHWC, labels_N)
    return loss, jax.tree.map(lambda w, g: w - rate * g, weights, grads)


def images(key, shape):
    """Noise with stripes, whose direction and pitch are the label."""
    labels_N = jax.random.randint(key, shape[:1], 0, CLASSES)
    y_H, x_W = jnp.arange(shape[1]), jnp.arange(shape[2])
    slope_N = labels_N[:, None, None] / CLASSES
    stripes_NHW = jnp.sin(0.7 * (slope_N * y_H[None, :, None] + (1 - slope_N) * x_W[None, None]))
    return stripes_NHW[..., None] + 0.3 * jax.random.normal(key, shape), labels_N


def partitioned(mesh):
    """The step for the devices of `mesh`."""
    mesh = np.asarray(mesh)
    step = functools.partial(train_step, mesh=mesh)
    return gshard.jit(step, devices=jax.devices()[: mesh.size])


def losses(step, weights, x_NHWC, labels_N, steps):
    """The loss before each step."""
    curve = []
    for _ in range(steps):
        loss, weights = step(weights, x_NHWC, labels_N)
        curve.append(float(loss))
    return curve


MESHES = {
    "1": [[0]],
    "width by 2": [[0, 1]],
    "width by 4": [range(4)],
    "width by 8": [range(8)],
    "2 x 4": np.arange(8).reshape(2, 4),
}


def main(shape=(2, 227, 227, 3), steps=5):
    weights = init(jax.random.key(0))
    data = images(jax.random.key(1), shape)
    console, table = Console(), Table("split", "loss", "KB sent", "by", "temporaries, MB")
    curve = losses(jax.jit(train_step), weights, *data, steps)
    table.add_row("jax.jit", " ".join(f"{x:.4f}" for x in curve), "", "", "")
    for name, mesh in MESHES.items():
        step = partitioned(mesh)
        curve = losses(step, weights, *data, steps)
        lowered = step.lower(weights, *data)
        by: dict[str, float] = {}
        for c in lowered.collectives:
            by[c.kind] = by.get(c.kind, 0) + c.total_bytes / 1e3
        temporaries = lowered.compile().memory_analysis().temp_size_in_bytes / 1e6
        table.add_row(
            name,
            " ".join(f"{x:.4f}" for x in curve),
            f"{sum(by.values()):.1f}",
            ", ".join(f"{kind} {kb:.1f}" for kind, kb in sorted(by.items())),
            f"{temporaries:.1f}",
        )
    console.print(table)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
