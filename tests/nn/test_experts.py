import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard.nn.attention import Segments
from gshard.nn.config import GatingConfig
from gshard.nn.experts import DISPATCHES, MoE
from gshard.nn.gating import route
from gshard.nn.pair import Inputs, Layer, Masks
from gshard.nn.strategy import Strategy
from tests.nn import models

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
    weights = (
        jnp.sum(jax.nn.one_hot(index, gates.shape[-1]) * weights[..., None], axis=2)
        * mask[..., None]
    )
    h = jax.nn.relu(jnp.einsum("GSM,EMH->GSEH", x, moe.experts.wi))
    return jnp.einsum("GSEH,EHM,GSE->GSM", h, moe.experts.wo, weights)


@pytest.mark.parametrize("dispatch", [*DISPATCHES, "dropless"])
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


@pytest.mark.parametrize("top_k", [1, pytest.param(2, marks=pytest.mark.slow)])
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


@pytest.mark.slow
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


def on_devices(strategy, moe, x, mask, key):
    """The layer with gradients, on the devices of a strategy."""

    def value(moe, x):
        y, metrics = strategy.weights(moe)(strategy.groups(x), mask, key, strategy)
        return jnp.sum(jnp.sin(y)) + metrics.aux_loss, (y, metrics)

    return jax.value_and_grad(value, (0, 1), has_aux=True)(moe, x)


@pytest.mark.slow
@pytest.mark.parametrize("grid", [(8, 1), (4, 2)])
def test_without_a_capacity_on_several_devices(grid):
    """Every kept choice is computed, and sent to its expert and back, as is its gradient."""
    config, key = GatingConfig(capacity_factor=0.5), jax.random.key(3)
    moe = MoE(8, M, H, "float32", jax.random.key(0), config, None, "dropless")
    x = jax.random.normal(jax.random.key(1), (8, 12, M))
    mask = jax.random.bernoulli(jax.random.key(2), 0.8, (8, 12))
    room = MoE(8, M, H, "float32", jax.random.key(0), GatingConfig(capacity_factor=99), None)
    want = jax.jit(lambda *a: on_devices(Strategy(), *a, key))(room, x, mask)
    step = gshard.jit(lambda *a: on_devices(Strategy(*grid), *a, key), devices=jax.devices()[:8])
    lowered = step.lower(moe, x, mask)
    sent = [c for c in lowered.collectives if c.kind == "all_to_all" and c.total_bytes]
    assert len(sent) == 2 * 4  # two choices, there and back, forward and backward
    for a, b in zip(*map(jax.tree.leaves, (lowered.compile()(moe, x, mask), want)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_what_has_to_have_a_capacity():
    with pytest.raises(ValueError, match=r"dispatch='dropless' is for .* here .*products='float8'"):
        models.config(dispatch="dropless", products="float8")
    assert models.config(dispatch="dropless").tuned().dispatch == "dropless"


@pytest.mark.slow
def test_tokens_that_crowd_few_of_many_experts_all_arrive():
    """Drawn to three of them they go through these in blocks, of which some are not full."""
    many, B, L = 40, 3, 50
    moe = MoE(many, M, H, "float32", jax.random.key(0), GatingConfig(), None, "flat")
    x = jax.random.normal(jax.random.key(1), (B, L, M)).at[..., 0].set(1.0)
    mask = jnp.arange(B * L).reshape(B, L) % 7 > 0

    def loss(apply):
        def fn(moe):
            y = apply(moe)
            return jnp.sum(jnp.sin(y)), y

        return jax.jit(jax.value_and_grad(fn, has_aux=True))

    sparse = loss(lambda moe: moe(x, mask, dropless=True)[0])
    dense = loss(lambda moe: dense_mixture(moe, x, mask))
    for drawn in (0.0, 4.0):
        crowded = eqx.tree_at(lambda m: m.gate, moe, moe.gate.at[0, 5:8].add(drawn))
        ((_, y), grads), ((_, want), want_grads) = sparse(crowded), dense(crowded)
        np.testing.assert_allclose(y, want, atol=1e-5)
        for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.slow
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
    marks = annotations(jaxpr)
    C = moe.config.capacity(S, E, train=False)
    assert [(e.invars[0].aval.shape, str(e.params["annotation"])) for e in marks] == [
        ((G, S, M), "split(tensor, 0, 8)"),
        ((E, G, C, M), "split(tensor, 0, 8)"),
        ((G, E, C, M), "split(tensor, 0, 8)"),
    ]
    plain = jax.make_jaxpr(lambda x: moe(x, mask)[0])(x)
    assert not annotations(plain)


def annotations(jaxpr):
    """Those of a program and of what it calls, in order."""
    found = []
    for eqn in jaxpr.eqns:
        found += [eqn] if eqn.primitive.name == "annotate" else []
        found += annotations(eqn.params["jaxpr"]) if eqn.primitive.name == "jit" else []
    return found


def plain_loop(moe, x, routing, weight, keep):
    """Token by token, choice by choice; `keep[e, c]` scales an expert's hidden units there."""
    y = np.zeros(x.shape)
    for g, s in np.ndindex(x.shape[:2]):
        for k in range(len(routing.expert)):
            if routing.kept[k, g, s]:
                e, c = int(routing.expert[k, g, s]), int(routing.slot[k, g, s])
                h = np.maximum(x[g, s] @ moe.experts.wi[e], 0) * keep[e, g, c]
                y[g, s] += weight[k, g, s] * (h @ moe.experts.wo[e])
    return y


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [1, 2])
def test_output_masking_leaves_out_single_choices_of_tokens_in_training_alone(top_k):
    x, mask = inputs()
    settings = {"capacity_factor": 1.0, "top_k": top_k}
    plain, masked = layer("index", **settings), layer("index", **settings, output_masking=0.4)
    logits = plain._logits(x)
    capacity = plain.config.capacity(S, E, train=True)
    key = jax.random.key(3)
    before, metrics = route(logits, capacity, plain.config, key, mask)
    after, masked_metrics = route(logits, capacity, masked.config, key, mask)
    ratio = np.asarray(after.weight / np.where(before.weight > 0, before.weight, 1))
    there = np.asarray(before.weight) > 0
    assert set(np.unique(ratio[there].round(5))) == {0.0, np.float32(1 / 0.6).round(5)}
    assert not ratio[~there].any()
    # Slots and what the router is judged by stay as they were.
    for name in ("expert", "slot", "kept"):
        np.testing.assert_array_equal(getattr(before, name), getattr(after, name))
    assert masked_metrics.aux_loss == metrics.aux_loss
    keep = np.ones((E, G, capacity, H))
    want = plain_loop(masked, x, after, after.weight, keep)
    np.testing.assert_allclose(masked(x, mask, key)[0], want, atol=1e-5)
    np.testing.assert_array_equal(masked(x, mask)[0], plain(x, mask)[0])


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["index", "flat"])
def test_expert_dropout_drops_hidden_units_of_experts_in_training_alone(dispatch):
    x, mask = inputs()
    config = GatingConfig(capacity_factor=1.0)
    args = (E, M, H, "float32", jax.random.key(0), config, None, dispatch)
    plain, dropping = MoE(*args), MoE(*args, dropout=0.3)
    key = jax.random.key(3)
    route_key, drop_key = jax.random.split(key)
    capacity = config.capacity(S, E, train=True)
    routing, _ = route(plain._logits(x), capacity, config, route_key, mask)
    shape = (E, G * capacity, H) if dispatch == "flat" else (E, G, capacity, H)
    keep = jax.random.bernoulli(drop_key, 0.7, shape).reshape(E, G, capacity, H) / 0.7
    want = plain_loop(dropping, x, routing, routing.weight, np.asarray(keep))
    np.testing.assert_allclose(dropping(x, mask, key)[0], want, atol=1e-5)
    np.testing.assert_array_equal(dropping(x, mask)[0], plain(x, mask)[0])


@pytest.mark.slow
def test_a_shared_expert_adds_its_result_for_every_token():
    layer = Layer(models.config(shared_hidden_dim=12), jax.random.key(0), sparse=True, cross=False)
    x = jax.random.normal(jax.random.key(1), (2, 6, layer.config.model_dim))
    segments = jnp.ones((2, 6), jnp.int32)
    masks = Masks(segments > 0, Segments(segments, segments))

    @jax.jit
    def both(layer, x):
        attention, h = layer.self_attention, layer.self_norm(x)
        h = layer.feed_forward_norm(x + attention(h, attention.keys_values(h), masks.own))
        without = eqx.tree_at(lambda m: m.feed_forward, layer, None)
        return layer(x, Inputs(masks))[0], without(x, Inputs(masks))[0] + layer.feed_forward(h)

    got, want = both(layer, x)
    assert layer.feed_forward.wi.shape == (layer.config.model_dim, 12)
    np.testing.assert_allclose(got, want, atol=1e-5)
