"""Models for the tests: layers of several kinds, their batches, and a loss beside the pipeline."""

import jax
import jax.numpy as jnp
import numpy as np

import gshard


def dense(w, x):
    """A residual layer."""
    return x + jnp.tanh(x @ w["in"]) @ w["out"]


def make_dense(layers=8, width=8, batch=16):
    """Weights, inputs and targets of dense layers."""
    draw = np.random.default_rng(0).normal
    weights = {
        "in": jnp.float32(draw(0, 0.3, (layers, width, 2 * width))),
        "out": jnp.float32(draw(0, 0.3, (layers, 2 * width, width))),
    }
    return weights, *jnp.float32(draw(size=(2, batch, width)))


def in_order(block, weights, x):
    """The layers one after the other, on all of the batch."""
    for layer in range(len(jax.tree.leaves(weights)[0])):
        x = block(jax.tree.map(lambda w, layer=layer: w[layer], weights), x)
    return x


def loss_of(y, target):
    """A sum of squares."""
    return jnp.sum((y - target) ** 2)


def piped(block, **settings):
    """The loss of a pipeline, as a function of weights, input and targets."""

    def loss(weights, x, targets):
        return gshard.pipeline(block, weights, x, head=loss_of, targets=targets, **settings)

    return loss


def plain(block):
    """The same loss without stages."""
    return lambda weights, x, targets: loss_of(in_order(block, weights, x), targets)
