"""Programs of users that are not like ours: a CNN in Flax's nnx and an LSTM in Equinox."""

from __future__ import annotations

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

Loss = tuple[Callable, Callable, tuple[jax.ShapeDtypeStruct, ...]]  # loss, weights, arguments


class ConvNet(nnx.Module):
    """Two convolutions with batch norm and pooling, then two dense layers."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Conv(3, 16, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(16, use_running_average=True, rngs=rngs)
        self.second = nnx.Conv(16, 32, (3, 3), rngs=rngs)
        self.hidden = nnx.Linear(32 * 8 * 8, 128, rngs=rngs)
        self.out = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """Logits of images."""
        x = nnx.max_pool(nnx.relu(self.norm(self.first(x))), (2, 2), (2, 2))
        x = nnx.avg_pool(nnx.relu(self.second(x)), (2, 2), (2, 2))
        return self.out(nnx.relu(self.hidden(x.reshape(x.shape[0], -1))))


def cnn(cut: Callable[[Array], Array], images: int = 64) -> Loss:
    """Classified images."""
    graph, weights, rest = nnx.split(ConvNet(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params, x, labels):
        logits = nnx.merge(graph, params, rest)(cut(x))
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1))

    x = jax.ShapeDtypeStruct((images, 32, 32, 3), jnp.float32)
    return loss, lambda: weights, (x, jax.ShapeDtypeStruct((images,), jnp.int32))


class Recurrent(eqx.Module):
    """An LSTM under scan, and a linear layer on its last state."""

    cell: eqx.nn.LSTMCell
    out: eqx.nn.Linear

    def __init__(self, key: Array, inputs: int = 32, hidden: int = 128):
        first, second = jax.random.split(key)
        self.cell = eqx.nn.LSTMCell(inputs, hidden, key=first)
        self.out = eqx.nn.Linear(hidden, 1, key=second)

    def __call__(self, sequence: Array) -> Array:
        """One number for a sequence."""
        zero = jnp.zeros(self.cell.hidden_size)
        (h, _), _ = jax.lax.scan(lambda s, x: (self.cell(x, s), None), (zero, zero), sequence)
        return self.out(h)


def lstm(cut: Callable[[Array], Array], batch: int = 64, length: int = 48) -> Loss:
    """Sequences, one number each."""
    arrays, rest = eqx.partition(Recurrent(jax.random.key(0)), eqx.is_array)

    def loss(params, x, y):
        return jnp.mean((jax.vmap(eqx.combine(params, rest))(cut(x))[:, 0] - y) ** 2)

    x = jax.ShapeDtypeStruct((batch, length, 32), jnp.float32)
    return loss, lambda: arrays, (x, jax.ShapeDtypeStruct((batch,), jnp.float32))
