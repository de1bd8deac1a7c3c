"""A pipeline means the layers in order: eagerly, under jax.jit, jax.grad and jax.vmap."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from tests.pipelining.programs import dense, in_order, loss_of, make_dense, piped, plain


def close(found, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", [lambda f: f, jax.jit, gshard.jit])
def test_values_and_gradients_are_those_of_the_layers_in_order(wrapped):
    weights, x, targets = make_dense(layers=3, batch=8)
    loss = piped(dense, stages=1, microbatches=4)
    found = wrapped(jax.value_and_grad(loss, (0, 1)))
    if wrapped is gshard.jit:
        found = gshard.jit(jax.value_and_grad(loss, (0, 1)), devices=jax.devices()[:1])
    close(found(weights, x, targets), jax.value_and_grad(plain(dense), (0, 1))(weights, x, targets))


def test_outputs_come_in_the_order_of_the_batch_and_have_gradients():
    weights, x, targets = make_dense(layers=3, batch=8)

    def loss(weights, x):
        return loss_of(gshard.pipeline(dense, weights, x, stages=3, microbatches=2), targets)

    wanted = jax.jit(jax.value_and_grad(plain(dense), (0, 1)))(weights, x, targets)
    close(jax.jit(jax.value_and_grad(loss, (0, 1)))(weights, x), wanted)


@pytest.mark.slow
def test_several_scores_of_which_one_or_two_have_gradients():
    weights, x, targets = make_dense(layers=2, batch=4)

    def scores(y, target):
        hits = jnp.sum(jnp.argmax(y, -1) == jnp.argmax(target, -1))
        return {"loss": loss_of(y, target), "hits": hits, "norm": jnp.sum(y * y)}

    def both(weights, share):
        found = gshard.pipeline(
            dense, weights, x, stages=2, microbatches=2, head=scores, targets=targets
        )
        return found["loss"] + share * found["norm"], found["hits"]

    def wanted(weights, share):
        found = scores(in_order(dense, weights, x), targets)
        return found["loss"] + share * found["norm"], found["hits"]

    for share in (0.0, 0.5):
        close(*(jax.value_and_grad(f, has_aux=True)(weights, share) for f in (both, wanted)))


@pytest.mark.slow
def test_a_batch_of_pipelines():
    weights, x, targets = make_dense(layers=2, width=3, batch=4)
    loss, wanted = piped(dense, stages=2, microbatches=2), plain(dense)
    several = jnp.stack([x, -x])
    close(*(jax.vmap(f, (None, 0, None))(weights, several, targets) for f in (loss, wanted)))


def test_a_hessian_times_a_vector_also_on_devices():
    """Integers that travel with the rows have no tangents."""
    weights, x, _ = make_dense(layers=2, width=3, batch=4)

    def block(w, x):
        return dense(w, x[0]) * (1 + x[1][:, None]), x[1]

    def head(y):
        return jnp.sum(y[0] ** 2)

    def pipe(x):
        rows = (x, jnp.arange(4))
        return gshard.pipeline(block, weights, rows, head=head, stages=2, microbatches=2)

    def product(loss):
        return jax.grad(lambda x: jnp.vdot(jax.grad(loss)(x), jnp.cos(x)))

    wanted = jax.jit(product(lambda x: head(in_order(block, weights, (x, jnp.arange(4))))))(x)
    found = gshard.jit(product(pipe), devices=jax.devices()[:2])(x)
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3)


def test_closures_trees_and_keys_of_layers_and_rows():
    weights, x, targets = make_dense(layers=4, batch=8)
    gain, rows = jnp.linspace(0.5, 1.5, 8), jnp.arange(8)
    keyed = {**weights, "key": jax.random.split(jax.random.key(7), 4)}

    def loss(weights, gain, run):
        def block(w, x):
            h, rows = x
            keys = jax.vmap(lambda row: jax.random.fold_in(w["key"], row))(rows)
            kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, h.shape[1:]))(keys)
            return dense(w, h) * gain * kept, rows

        return run(block, {**keyed, **weights}, (x, rows), lambda y, t: loss_of(y[0], t))

    def pipe(block, weights, x, head):
        return gshard.pipeline(
            block, weights, x, stages=2, microbatches=4, head=head, targets=targets
        )

    def order(block, weights, x, head):
        return head(in_order(block, weights, x), targets)

    step = jax.jit(jax.value_and_grad(loss, (0, 1)), static_argnums=2)
    close(*(step(weights, gain, run) for run in (pipe, order)))
