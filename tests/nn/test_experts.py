import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gshard.nn.experts import DISPATCHES, MoE
from gshard.nn.gating import GatingConfig, route
from gshard.nn.strategy import Strategy

G, S, E, M, H = 3, 10, 5, 8, 16


def layer(dispatch, **config):
    return MoE(E, M, H, "float32", jax.random.key(0), GatingConfig(**config), None, dispatch)


def inputs(dtype=jnp.float32):
    x = jax.random.normal(jax.random.key(1), (G, S, M), dtype)
    mask = jax.random.bernoulli(jax.random.key(2), 0.8, (G, S))
    return x, mask


def dense_mixture(moe, x, mask):
    """Every expert on every token, weighted by the two best gates."""
    gates = jax.nn.softmax(jnp.einsum("GSM,ME->GSE", x, moe.gate, precision="highest"))
    best, index = jax.lax.top_k(gates, 2)
    weights = best / jnp.sum(best, -1, keepdims=True)
    weights = jnp.sum(jax.nn.one_hot(index, E) * weights[..., None], axis=2) * mask[..., None]
    h = jax.nn.relu(jnp.einsum("GSM,EMH->GSEH", x, moe.experts.wi))
    return jnp.einsum("GSEH,EHM,GSE->GSM", h, moe.experts.wo, weights)


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_is_a_dense_mixture_when_nothing_overflows(dispatch):
    moe = layer(dispatch, capacity_factor=E, second_expert="all")
    x, mask = inputs()

    def sparse(moe, x):
        y, metrics = moe(x, mask, jax.random.key(3))
        return jnp.sum(jnp.sin(y)), (y, metrics)

    def dense(moe, x):
        y = dense_mixture(moe, x, mask)
        return jnp.sum(jnp.sin(y)), y

    value = lambda f: jax.jit(jax.value_and_grad(f, argnums=(0, 1), has_aux=True))(moe, x)  # noqa: E731
    (_, (got, metrics)), got_grads = value(sparse)
    (_, want), want_grads = value(dense)
    assert metrics.overflow_first == metrics.overflow_second == 0
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert jnp.abs(want_grads[0].gate).max() > 1e-3  # the router learns through the weights
    for a, b in zip(jax.tree.leaves(got_grads), jax.tree.leaves(want_grads), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.parametrize("top_k", [1, 2])
def test_dispatches_agree_under_overflow_and_random_routing(top_k):
    x, mask = inputs()

    def run(dispatch):
        moe = layer(dispatch, capacity_factor=1.0, top_k=top_k)

        def f(moe, x):
            y, metrics = moe(x, mask, jax.random.key(3))
            return jnp.sum(y * y) + metrics.aux_loss, (y, metrics)

        return jax.jit(jax.value_and_grad(f, argnums=(0, 1), has_aux=True))(moe, x)

    (_, (y, metrics)), _ = first = run("einsum")
    assert metrics.overflow_first > 0
    assert metrics.tokens_0 > 0
    empty = np.abs(y).max(-1) == 0  # overflowed tokens and padding get zeros: the residual
    assert empty.sum() >= (~mask).sum() + int(metrics.tokens_0 * mask.sum())
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(run("index")), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_groups_are_cut_from_the_batch_in_order():
    moe = layer("einsum", second_expert="all")
    x, mask = inputs()
    whole = MoE(E, M, H, "float32", jax.random.key(0), moe.config, 1, "einsum")
    one, _ = eqx.filter_jit(whole)(x, mask)
    flat, _ = eqx.filter_jit(moe)(x.reshape(1, G * S, M), mask.reshape(1, G * S))
    np.testing.assert_allclose(one.reshape(flat.shape), flat, atol=1e-6)
    with pytest.raises(ValueError, match="3 x 10 tokens do not divide into 4 groups"):
        MoE(E, M, H, "float32", jax.random.key(0), moe.config, 4)(x, mask)


def test_dropless_keeps_every_token():
    moe = layer("einsum", eval_capacity_factor=0.5)
    x, mask = inputs()
    _, dropping = eqx.filter_jit(moe)(x, mask)
    y, metrics = jax.jit(lambda x: moe(x, mask, dropless=True))(x)
    assert dropping.tokens_2 < 1
    assert metrics.tokens_2 == 1
    np.testing.assert_allclose(y, dense_mixture(moe, x, mask), atol=1e-5)


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_router_stays_float32_in_bfloat16(dispatch):
    moe = MoE(E, M, H, "bfloat16", jax.random.key(0), GatingConfig(), None, dispatch)
    x, mask = inputs(jnp.bfloat16)
    assert moe.gate.dtype == jnp.float32
    y, metrics = jax.eval_shape(lambda x: moe(x, mask), x)
    assert y.dtype == jnp.bfloat16
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(metrics))
    logits = jnp.einsum("GSM,ME->GSE", x.astype(jnp.float32), moe.gate, precision="highest")
    _, want = route(logits, 4, GatingConfig(), None, mask)
    np.testing.assert_allclose(eqx.filter_jit(moe)(x, mask)[1].entropy, want.entropy, rtol=1e-5)


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_annotations_are_the_papers(dispatch):
    """Groups split on entering and leaving, experts split between, and nothing else."""
    moe = layer(dispatch)
    x, mask = inputs()
    jaxpr = jax.make_jaxpr(lambda x: moe(x, mask, strategy=Strategy(8))[0])(x)
    marks = [e for e in jaxpr.eqns if e.primitive.name == "annotate"]
    C = moe.config.capacity(S, E, train=False)
    assert [(e.invars[0].aval.shape, str(e.params["annotation"])) for e in marks] == [
        ((G, S, M), "split(tensor, 0, 8)"),
        ((E, G, C, M), "split(tensor, 0, 8)"),
        ((G, E, C, M), "split(tensor, 0, 8)"),
    ]
    plain = jax.make_jaxpr(lambda x: moe(x, mask)[0])(x)
    assert not [e for e in plain.eqns if e.primitive.name == "annotate"]
