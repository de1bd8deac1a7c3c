"""Models for the tests: layers of several kinds, their batches, and a loss beside the pipeline."""

import jax
import jax.numpy as jnp
import numpy as np

import gshard
from gshard.tensors.annotate import devices_of_trace


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


def moe(w, x):
    """The best of some experts for every row, with a capacity of twice its share."""
    gates = jax.nn.softmax(x @ w["gate"])
    chosen = jax.nn.one_hot(jnp.argmax(gates, -1), gates.shape[-1])
    slots = max(2 * len(x) // gates.shape[-1], 1)
    place = (jnp.cumsum(chosen, 0) - 1) * chosen
    mask = chosen[..., None] * jax.nn.one_hot(place.astype(int), slots)
    parts = min(2, devices_of_trace())
    sent = gshard.split(jnp.einsum("tec,tm->ecm", mask, x), 0, parts)
    hidden = jax.nn.relu(jnp.einsum("ecm,emf->ecf", sent, w["up"]))
    return x + jnp.einsum("tec,te,ecf,efm->tm", mask, gates, hidden, w["down"])


def cnn(w, x):
    """A residual block of two convolutions, normalized by channel."""
    for name in ("first", "second"):
        y = jax.lax.conv_general_dilated(
            x, w[name], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        y = y * jax.lax.rsqrt(jnp.mean(y * y, (1, 2), keepdims=True) + 1e-6)
        x = x + jax.nn.relu(y * w["gain"])
    return x


def dropout(w, x):
    """A dense layer of which a part is dropped, by the keys of layer and row."""
    h, rows = x
    keys = jax.vmap(lambda row: jax.random.fold_in(w["key"], row))(rows)
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, h.shape[1:]))(keys)
    return dense(w, h) * kept, rows


def _normal(*shape):
    return 0.3 * jax.random.normal(jax.random.key(sum(shape)), shape)


def make_kind(kind, layers, batch):
    """Weights, inputs and targets for a block in `KINDS`."""
    weights, x, targets = make_dense(layers, batch=batch)
    if kind == "moe":
        weights = {"gate": _normal(layers, 8, 4), "up": _normal(layers, 4, 8, 16),
                   "down": _normal(layers, 4, 16, 8)}  # fmt: skip
    if kind == "cnn":
        weights = {"first": _normal(layers, 3, 3, 4, 4), "second": _normal(layers, 3, 3, 4, 4),
                   "gain": 1 + _normal(layers, 4)}  # fmt: skip
        x, targets = _normal(batch, 5, 6, 4), _normal(batch, 5, 6, 4)
    return weights, x, targets


KINDS = {"dense": dense, "moe": moe, "cnn": cnn, "dropout": dropout}


def keyed(run):
    """A loss of weights and an input, with keys for each layer and numbers of the rows."""

    def loss(weights, x, targets):
        layers = len(weights["in"])
        keys = jax.random.split(jax.random.key(3), layers)
        return run({**weights, "key": keys}, (x, jnp.arange(len(x))), targets)

    return loss


def in_order(block, weights, x):
    """The layers one after the other, on all of the batch."""
    for layer in range(len(jax.tree.leaves(weights)[0])):
        x = block(jax.tree.map(lambda w, layer=layer: w[layer], weights), x)
    return x


def loss_of(y, target):
    """A sum of squares."""
    return jnp.sum((jax.tree.leaves(y)[0] - target) ** 2)


def piped(block, **settings):
    """The loss of a pipeline, as a function of weights, input and targets."""

    def loss(weights, x, targets):
        return gshard.pipeline(block, weights, x, head=loss_of, targets=targets, **settings)

    return loss


def plain(block):
    """The same loss without stages."""
    return lambda weights, x, targets: loss_of(in_order(block, weights, x), targets)
