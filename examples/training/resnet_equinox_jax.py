"""A residual network in Equinox, with batch norm, dropout and pooling. For one device."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

CLASSES, SIDE, WIDTHS = 10, 16, (16, 32)


class Block(eqx.Module):
    first: eqx.nn.Conv2d
    second: eqx.nn.Conv2d
    norm1: eqx.nn.BatchNorm
    norm2: eqx.nn.BatchNorm
    shortcut: eqx.nn.Conv2d | None

    def __init__(self, before, width, stride, key):
        keys = jax.random.split(key, 3)
        self.first = eqx.nn.Conv2d(before, width, 3, stride, 1, use_bias=False, key=keys[0])
        self.second = eqx.nn.Conv2d(width, width, 3, 1, 1, use_bias=False, key=keys[1])
        self.norm1 = eqx.nn.BatchNorm(width, "batch", mode="batch")
        self.norm2 = eqx.nn.BatchNorm(width, "batch", mode="batch")
        same = before == width and stride == 1
        self.shortcut = None if same else eqx.nn.Conv2d(before, width, 1, stride, key=keys[2])

    def __call__(self, x, state):
        y, state = self.norm1(self.first(x), state)
        y, state = self.norm2(self.second(jax.nn.relu(y)), state)
        return jax.nn.relu(y + (x if self.shortcut is None else self.shortcut(x))), state


class ResNet(eqx.Module):
    stem: eqx.nn.Conv2d
    blocks: list[Block]
    pool: eqx.nn.AvgPool2d
    dropout: eqx.nn.Dropout
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 2 + 2 * len(WIDTHS))
        self.stem = eqx.nn.Conv2d(3, WIDTHS[0], 3, 1, 1, key=keys[0])
        befores = [WIDTHS[0], *WIDTHS[:-1]]
        self.blocks = []
        for i, (before, width) in enumerate(zip(befores, WIDTHS, strict=True)):
            self.blocks += [
                Block(before, width, 1 + (i > 0), keys[1 + 2 * i]),
                Block(width, width, 1, keys[2 + 2 * i]),
            ]
        side = SIDE // 2 ** (len(WIDTHS) - 1)
        self.pool = eqx.nn.AvgPool2d(side, side)
        self.dropout = eqx.nn.Dropout(0.1)
        self.head = eqx.nn.Linear(WIDTHS[-1], CLASSES, key=keys[-1])

    def __call__(self, x, state, key):
        x = self.stem(x)
        for block in self.blocks:
            x, state = block(x, state)
        return self.head(self.dropout(self.pool(x)[:, 0, 0], key=key)), state


OPTIMIZER = optax.sgd(0.05, momentum=0.9)


def loss_of(model, state, images, labels, key):
    keys = jax.random.split(key, images.shape[0])
    forward = jax.vmap(model, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))
    logits, state = forward(images, state, keys)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), state


@eqx.filter_jit(donate="all-except-first")
def train_step(data, model, state, optimizer_state):
    images, labels, key = data
    grad = eqx.filter_value_and_grad(loss_of, has_aux=True)
    (loss, state), grads = grad(model, state, images, labels, key)
    updates, optimizer_state = OPTIMIZER.update(grads, optimizer_state, model)
    return loss, eqx.apply_updates(model, updates), state, optimizer_state


def setup():
    model, state = eqx.nn.make_with_state(ResNet)(jax.random.key(0))
    return model, state, OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))


def batch(step, size=64):
    """Coloured stripes: the class is their direction."""
    rng = np.random.default_rng(step)
    labels = rng.integers(0, CLASSES, size)
    angle = (np.pi * labels / CLASSES)[:, None, None]
    y, x = np.mgrid[:SIDE, :SIDE]
    stripes = np.sin(np.cos(angle) * x + np.sin(angle) * y + rng.random((size, 1, 1)) * 6)
    images = stripes[:, None] * rng.random((size, 3, 1, 1)) + rng.normal(size=(size, 3, SIDE, SIDE))
    return jnp.asarray(images, jnp.float32), jnp.asarray(labels), jax.random.key(step)


def train(steps):
    state = setup()
    losses = []
    for i in range(steps):
        loss, *state = train_step(batch(i), *state)
        losses.append(float(loss))
    return losses


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    print(*(f"{loss:.3f}" for loss in train(40)[::5]))
