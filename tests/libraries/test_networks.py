"""A step of training in each library, with the batch split: only gradients and statistics move."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.libraries.programs import check_program, data

optax = pytest.importorskip("optax")
# Their warnings are theirs.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

IMAGES, LABELS = data(16, 6, 6, 3), np.arange(16) % 5


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def test_flax_linen():
    nn = pytest.importorskip("flax.linen")

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Conv(8, (3, 3))(x)))
            x = nn.max_pool(x, (2, 2), (2, 2)).reshape(x.shape[0], 9, 8)
            x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
            return nn.Dense(5)(nn.Dropout(0.1, deterministic=not train)(x).mean(1))

    network, optimizer = Network(), optax.sgd(0.1, momentum=0.9)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = network.init(keys, IMAGES, train=True)

    def step(variables, state, images, labels, key):
        def loss(params):
            logits, updated = network.apply(
                variables | {"params": params},
                images,
                train=True,
                rngs={"dropout": key},
                mutable=["batch_stats"],
            )
            return cross_entropy(logits, labels), updated

        (value, updated), grads = jax.value_and_grad(loss, has_aux=True)(variables["params"])
        updates, state = optimizer.update(grads, state)
        return value, updated | {"params": optax.apply_updates(variables["params"], updates)}, state

    args = variables, optimizer.init(variables["params"]), IMAGES, LABELS, jax.random.key(2)
    assert check_program(step, *args, split={2: 0, 3: 0}) == []


def test_flax_nnx():
    nnx = pytest.importorskip("flax.nnx")

    class Network(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(3, 8, (3, 3), rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)
            self.recurrent = nnx.RNN(nnx.GRUCell(8, 8, rngs=rngs))
            self.out = nnx.Linear(8, 5, rngs=rngs)

        def __call__(self, x):
            x = self.dropout(nnx.relu(self.norm(self.conv(x))))
            return self.out(self.recurrent(x.reshape(x.shape[0], -1, 8)[:, :6]).mean(1))

    model = Network(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    definition, state = nnx.split((model, optimizer))

    def step(state, images, labels):
        model, optimizer = nnx.merge(definition, state)
        value, grads = nnx.value_and_grad(lambda m: cross_entropy(m(images), labels))(model)
        optimizer.update(model, grads)
        return value, nnx.state(model, nnx.Param), nnx.state(model, nnx.BatchStat)

    assert check_program(step, state, IMAGES, LABELS, split={1: 0, 2: 0}) == []


def test_haiku():
    hk = pytest.importorskip("haiku")

    def forward(images):
        x = hk.BatchNorm(True, True, 0.9)(hk.Conv2D(8, 3)(images), is_training=True)
        x = hk.dropout(hk.next_rng_key(), 0.2, jax.nn.relu(x))
        x = x.reshape(x.shape[0], -1, 8)[:, :9]
        attention = hk.MultiHeadAttention(2, 4, w_init=hk.initializers.VarianceScaling())
        return hk.Linear(5)(hk.LayerNorm(-1, True, True)(attention(x, x, x)).mean(1))

    network, optimizer = hk.transform_with_state(forward), optax.sgd(0.1)
    params, state = network.init(jax.random.key(0), IMAGES)

    def step(params, state, optimizer_state, images, labels, key):
        def loss(params):
            logits, after = network.apply(params, state, key, images)
            return cross_entropy(logits, labels), after

        (value, after), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, optimizer_state = optimizer.update(grads, optimizer_state)
        return value, optax.apply_updates(params, updates), after, optimizer_state

    args = params, state, optimizer.init(params), IMAGES, LABELS, jax.random.key(1)
    assert check_program(step, *args, split={3: 0, 4: 0}) == []


def test_equinox_with_batch_norm_and_dropout():
    eqx = pytest.importorskip("equinox")

    class Network(eqx.Module):
        first: eqx.nn.Linear
        norm: eqx.nn.BatchNorm
        dropout: eqx.nn.Dropout
        last: eqx.nn.Linear

        def __init__(self, key):
            one, two = jax.random.split(key)
            self.first = eqx.nn.Linear(6, 8, key=one)
            self.norm = eqx.nn.BatchNorm(8, "batch", mode="ema")
            self.dropout = eqx.nn.Dropout(0.3)
            self.last = eqx.nn.Linear(8, 5, key=two)

        def __call__(self, x, state, key):
            x, state = self.norm(self.first(x), state)
            return self.last(self.dropout(jax.nn.relu(x), key=key)), state

    model, state = eqx.nn.make_with_state(Network)(jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    optimizer = optax.sgd(0.1)

    def step(params, state, optimizer_state, x, labels, key):
        def loss(params):
            keys = jax.random.split(key, x.shape[0])
            batched = jax.vmap(
                eqx.combine(params, static),
                axis_name="batch",
                in_axes=(0, None, 0),
                out_axes=(0, None),
            )
            logits, after = batched(x, state, keys)
            return cross_entropy(logits, labels), after

        (value, after), grads = eqx.filter_value_and_grad(loss, has_aux=True)(params)
        updates, optimizer_state = optimizer.update(grads, optimizer_state)
        return value, eqx.apply_updates(params, updates), after, optimizer_state

    args = params, state, optimizer.init(params), data(16, 6), LABELS, jax.random.key(1)
    assert check_program(step, *args, split={3: 0, 4: 0}) == []


def test_sparse_matrices():
    """BCOO and BCSR of `jax.experimental.sparse`: dims of the dense operand are free."""
    from jax.experimental import sparse

    dense = data(16, 12) * (data(16, 12, seed=1) > 0.5)
    matrix, rows = sparse.BCOO.fromdense(dense), sparse.BCSR.fromdense(dense)
    x = data(12, 8)

    def fn(x, matrix, rows):
        grad = jax.grad(lambda x: jnp.sum((matrix @ x) ** 2))(x)
        return matrix @ x, rows @ x, (matrix.T @ (matrix @ x)), grad

    assert check_program(fn, x, matrix, rows, split={0: 1}) == []
    by_entry = check_program(
        lambda matrix: ((matrix * 2).todense(), matrix.sum(0).todense(), (matrix @ x)),
        matrix,
        split={0: 0},
    )
    assert all(reason.split(":")[0] != "all_gather" for reason in by_entry), by_entry
