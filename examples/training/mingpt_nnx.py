"""minGPT's demo in Flax NNX: a small GPT learns to sort six digits. Over 2 x 4 devices:
the batch is split over the rows of the mesh, the hidden units over its columns."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import gshard
import gshard.contrib.nnx

MESH = np.arange(8).reshape(2, 4)
DIGITS, LENGTH, WIDTH, HEADS, LAYERS = 3, 6, 48, 4, 3


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, dropout_rate=0.1, decode=False, rngs=rngs
        )
        self.grow = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.shrink = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attention(self.norm1(x), mask=mask, deterministic=False)
        hidden = nnx.gelu(self.grow(self.norm2(x)))
        hidden = gshard.shard(hidden, MESH[:, None, :])
        return x + self.dropout(self.shrink(hidden))


class GPT(nnx.Module):
    def __init__(self, rngs):
        self.tokens = nnx.Embed(DIGITS, WIDTH, rngs=rngs)
        self.places = nnx.Embed(2 * LENGTH - 1, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, DIGITS, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.dropout(self.tokens(tokens) + self.places(jnp.arange(tokens.shape[1])))
        mask = nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


@gshard.contrib.nnx.jit
def train_step(model, optimizer, tokens, targets):
    tokens, targets = (gshard.shard(x, MESH[:, :1]) for x in (tokens, targets))

    def loss_of(model):
        losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens), targets)
        return losses[:, LENGTH - 1 :].mean()  # the unsorted digits are given, not predicted

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


def setup():
    model = GPT(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(1e-3, b2=0.95), wrt=nnx.Param)


def batch(step, size=64):
    digits = np.random.default_rng(step).integers(0, DIGITS, (size, LENGTH))
    both = np.concatenate([digits, np.sort(digits, 1)], 1)
    return both[:, :-1], both[:, 1:]


def train(steps):
    model, optimizer = setup()
    return [float(train_step(model, optimizer, *batch(i))) for i in range(steps)]


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    print(*(f"{loss:.3f}" for loss in train(40)[::5]))
