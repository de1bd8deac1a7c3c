"""A character-level Transformer in Haiku, after Haiku's own example. For one device."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

CHARACTERS = "0123456789+=;"
LENGTH, WIDTH, HEADS, LAYERS = 32, 64, 4, 2


def block(x, mask):
    init = hk.initializers.VarianceScaling(2 / LAYERS)
    norm = hk.LayerNorm(-1, True, True)(x)
    attention = hk.MultiHeadAttention(HEADS, WIDTH // HEADS, w_init=init)
    x = x + hk.dropout(hk.next_rng_key(), 0.1, attention(norm, norm, norm, mask))
    hidden = jax.nn.gelu(hk.Linear(4 * WIDTH, w_init=init)(hk.LayerNorm(-1, True, True)(x)))
    return x + hk.dropout(hk.next_rng_key(), 0.1, hk.Linear(WIDTH, w_init=init)(hidden))


def forward(tokens):
    places = hk.get_parameter("places", (LENGTH, WIDTH), init=hk.initializers.TruncatedNormal(0.02))
    x = hk.Embed(len(CHARACTERS), WIDTH)(tokens) + places
    mask = jnp.tril(jnp.ones((1, 1, LENGTH, LENGTH)))
    for _ in range(LAYERS):
        x = block(x, mask)
    return hk.Linear(len(CHARACTERS))(hk.LayerNorm(-1, True, True)(x))


NETWORK = hk.transform(forward)
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))


@jax.jit
def train_step(params, optimizer_state, key, tokens):
    def loss_of(params):
        logits = NETWORK.apply(params, key, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, optimizer_state = OPTIMIZER.update(grads, optimizer_state)
    return optax.apply_updates(params, updates), optimizer_state, loss


def setup():
    params = NETWORK.init(jax.random.key(0), batch(0)[1][:, :-1])
    return params, OPTIMIZER.init(params)


def batch(step, size=64):
    """Sums of two digits, one after the other: 3+4=7;9+8=17;..."""
    rng = np.random.default_rng(step)
    pairs = rng.integers(0, 10, (size, LENGTH, 2))
    rows = ["".join(f"{a}+{b}={a + b};" for a, b in row)[: LENGTH + 1] for row in pairs]
    tokens = np.array([[CHARACTERS.index(c) for c in row] for row in rows])
    return jax.random.key(step), jnp.asarray(tokens)


def train(steps):
    params, optimizer_state = setup()
    losses = []
    for i in range(steps):
        params, optimizer_state, loss = train_step(params, optimizer_state, *batch(i))
        losses.append(float(loss))
    return losses


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    print(*(f"{loss:.3f}" for loss in train(40)[::5]))
