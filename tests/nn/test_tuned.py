"""The ways of computing that are fast on one GPU, each against the plain way."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard.nn import (
    Strategy,
    TrainState,
    Transformer,
    adafactor,
    cross_entropy,
    loss,
    train_step,
)
from gshard.nn.config import GatingConfig
from gshard.nn.experts import MoE
from gshard.nn.flat import flat_dropless
from gshard.nn.gating import Routing, float32_logits, parts, route
from gshard.nn.hashing import hash_dropout, hashed_bits, round_stochastically, seed_of
from gshard.nn.layers import relu
from gshard.nn.step import LossSettings, weighted_nll
from tests.nn import models
from tests.oracle import kinds

SEED = jnp.array([3, 5], jnp.uint32)


def close(got, want, **tolerance):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, **tolerance)


def unstacked(tree):
    """A stacked model (or what has its structure) with every pair by itself."""

    def pairs(stack):
        count = len(jax.tree.leaves(stack)[0])
        return tuple(jax.tree.map(lambda x, i=i: x[i], stack) for i in range(count))

    config = dataclasses.replace(tree.config, stacked=False)
    changed = {"encoder": pairs(tree.encoder), "decoder": pairs(tree.decoder), "config": config}
    copy = object.__new__(Transformer)
    for field in dataclasses.fields(Transformer):
        object.__setattr__(copy, field.name, changed.get(field.name, getattr(tree, field.name)))
    return copy


def tuned(config):
    """In all but the stacking, which `unstacked` undoes: both then have the same weights."""
    return dataclasses.replace(config.tuned(), stacked=True)


@pytest.mark.slow
def test_layers_written_out_are_the_scanned_ones():
    stacked = models.config(encoder_layers=4, residual_dropout=0.1)
    written_out = dataclasses.replace(stacked, stacked=False)
    key, batch = jax.random.key(0), models.batch()
    first = [jax.jit(Transformer, static_argnums=0)(c, key) for c in (stacked, written_out)]
    close(first[1], unstacked(first[0]), rtol=0)

    model = models.model(stacked)
    # LLVM's first level (tests/conftest.py) contracts other products and sums in a loop.
    as_users = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
    graded = jax.value_and_grad(lambda m: loss(m, batch, key), has_aux=True)
    value = jax.jit(graded, compiler_options=as_users)
    (want, want_metrics), want_grads = value(model)
    (got, got_metrics), got_grads = value(unstacked(model))
    np.testing.assert_allclose(got, want, rtol=1e-6)
    close(got_metrics, want_metrics, rtol=1e-5, atol=1e-6)
    close(got_grads, unstacked(want_grads), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", [pytest.param("index", marks=pytest.mark.slow), "flat"])
def test_written_out_decoding_is_the_scanned_one(dispatch):
    model = models.model(models.config(decoder_layers=4))
    other = unstacked(models.model(models.config(decoder_layers=4, dispatch=dispatch)))
    source, _ = models.tokens()

    def logits(model):
        memory, _ = model.encode(source, (source > 0) * 1, np.arange(8) + 0 * source, dropless=True)
        cache = model.start_decoding(memory, 3)
        found = []
        for step in range(3):
            mask = np.broadcast_to(np.arange(3) <= step, (4, 1, 3))
            token = np.full((4, 1), step + 1)
            out, cache = model.decode_step(token, token, cache, step, mask, source > 0)
            found.append(out)
        return jnp.stack(found)

    np.testing.assert_allclose(jax.jit(logits)(other), jax.jit(logits)(model), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("value_dim", [6, 10])  # as the keys': one product for all
def test_a_tuned_model_on_one_device_is_the_plain_one(value_dim):
    """Without dropout, whose numbers are others; with keys of one kind, routing draws the same."""
    plain = models.config(decoder_layers=4, groups=4, value_dim=value_dim, random="hash")
    key, batch = jax.random.key(0), models.batch()
    model = models.model(plain)
    fast = unstacked(models.model(tuned(plain)))
    value = jax.jit(jax.value_and_grad(lambda m: loss(m, batch, key)[0]))
    want, want_grads = value(model)
    got, got_grads = value(fast)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    leaves = zip(*map(jax.tree.leaves, (got_grads, unstacked(want_grads))), strict=True)
    for a, b in leaves:
        assert np.linalg.norm(a - b) <= 1e-4 * np.linalg.norm(b) + 1e-7


def tuned_losses(jit, strategy, devices_config):
    optimizer = adafactor(0.3, warmup=1, fused=True)
    state = TrainState(unstacked(models.model(devices_config)), None, jnp.zeros((), jnp.int32))
    state = state._replace(opt_state=optimizer.init(state.model))
    step = functools.partial(train_step, optimizer=optimizer, strategy=strategy)
    run, found = jit(step), []
    for seed in (0, 1, 0):
        state, metrics = run(state, models.batch(B=8, seed=seed), jax.random.key(7))
        found.append(float(metrics.loss))
    return found


@pytest.mark.slow
def test_a_tuned_model_on_eight_devices_trains_like_on_one():
    dropout = dict.fromkeys(("input_dropout", "residual_dropout", "attention_dropout"), 0.1)
    config = tuned(models.config(experts=8, groups=8, value_dim=6, **dropout))
    want = tuned_losses(jax.jit, Strategy(), config)
    got = tuned_losses(gshard.jit, Strategy(8), config)
    np.testing.assert_allclose(got, want, rtol=2e-5)
    assert abs(want[2] - want[0]) > 0.01  # the same batch again: the weights have moved


@pytest.mark.slow
def test_a_tuned_model_keeps_its_four_all_to_all():
    config = tuned(models.config(experts=8, groups=8, value_dim=6))
    optimizer = adafactor(fused=True)
    model = unstacked(models.model(config))
    state = TrainState(model, optimizer.init(model), jnp.zeros((), jnp.int32))
    step = functools.partial(train_step, optimizer=optimizer, strategy=Strategy(8))
    lowered = gshard.jit(step, devices=8).lower(state, models.batch(B=8), jax.random.key(0))
    found = kinds(lowered)
    assert found["all_to_all"] == 2 * 4  # two layers with experts
    assert set(found) == {"all_to_all", "all_reduce"}


@pytest.mark.parametrize("loads", ["even", "all to one", "none"])
def test_dropless_gives_room_to_all_whatever_the_loads(loads):
    """Empty experts, experts with a few tokens, and one that all tokens want."""
    G, S, E, M, H = 6, 40, 8, 16, 32
    rng = np.random.default_rng(0)
    first = np.full((G, S), 3) if loads == "all to one" else rng.integers(0, E, (G, S))
    expert = np.stack([first, (first + rng.integers(1, E, (G, S))) % E])
    kept = np.broadcast_to(loads != "none", expert.shape)
    weight = rng.random(expert.shape).astype(np.float32) * kept
    x = rng.normal(size=(G, S, M)).astype(np.float32)
    slot = np.zeros(expert.shape, np.int32)  # choices before it of its expert in its group
    for k, g, s in np.ndindex(expert.shape):
        before = np.r_[expert[:k, g].ravel(), expert[k, g, :s]]
        slot[k, g, s] = np.sum(before == expert[k, g, s])
    routing = Routing(jnp.asarray(expert), jnp.asarray(slot), weight, kept)
    some = MoE(E, M, H, "float32", jax.random.key(0)).experts

    got = jax.jit(lambda r, x: flat_dropless(some.in_blocks, r, x, E))(routing, x)
    every = some.in_place(jnp.broadcast_to(x.reshape(1, G * S, M), (E, G * S, M)))
    chosen = np.take_along_axis(np.asarray(every).reshape(E, G, S, M), expert[..., None], axis=0)
    want = np.sum(weight[..., None] * chosen, axis=0)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [2, 3, 8])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_in_chunks_is_the_whole_one(chunks, smoothing):
    B, T, M, V = 3, 6, 8, 17
    rng = np.random.default_rng(0)
    x, table = (jnp.float32(rng.normal(size=s)) for s in ((B, T, M), (V, M)))
    labels = rng.integers(0, V, (B, T))
    weights = jnp.float32(rng.random((B, T)))

    def whole(x, table):
        logits = jnp.einsum("BTM,VM->BTV", x, table)
        return 3.0 * jnp.sum(weights * cross_entropy(logits, labels, smoothing))

    def cut(x, table):
        return 3.0 * weighted_nll(x, table, labels, weights, LossSettings(smoothing, chunks))

    want = jax.value_and_grad(whole, (0, 1))(x, table)
    close(jax.jit(jax.value_and_grad(cut, (0, 1)))(x, table), want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(cut(x, table), want[0], rtol=1e-5)


def test_no_logits_of_the_whole_batch_exist():
    x, table = jnp.ones((4, 16, 8), jnp.bfloat16), jnp.ones((50, 8), jnp.bfloat16)
    labels, weights = jnp.ones((4, 16), jnp.int32), jnp.ones((4, 16))
    f = jax.grad(lambda x: weighted_nll(x, table, labels, weights, LossSettings(0.1, 8)))
    text = str(jax.make_jaxpr(f)(x))
    assert "4,2,50" in text
    assert "4,16,50" not in text


def test_float32_product_of_bfloat16_is_exact():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 64, 32)), jnp.bfloat16)
    gate = jnp.float32(rng.normal(size=(32, 8)))
    np.testing.assert_array_equal(np.sum(np.float32(parts(gate)), axis=-2), gate)
    exact = np.einsum("GSM,ME->GSE", np.float64(x), np.float64(gate))
    got = jax.jit(float32_logits)(x, gate)
    plain = jnp.einsum("GSM,ME->GSE", x.astype(jnp.float32), gate, precision="highest")
    assert np.abs(got - exact).max() < 2 * np.abs(plain - exact).max() + 1e-7

    grads = jnp.float32(rng.normal(size=(2, 64, 8)))
    x_grad, gate_grad = jax.jit(lambda: jax.vjp(float32_logits, x, gate)[1](grads))()
    want = np.einsum("GSM,GSE->ME", np.float64(x), np.float64(grads))
    np.testing.assert_allclose(gate_grad, want, rtol=1e-5, atol=1e-4)
    want = np.einsum("GSE,ME->GSM", np.float64(grads), np.float64(gate))
    assert np.linalg.norm(np.float32(x_grad) - want) < 0.01 * np.linalg.norm(want)


@pytest.mark.slow
def test_router_of_bfloat16_chooses_as_in_float32():
    moe = MoE(8, 16, 8, "bfloat16", jax.random.key(0), GatingConfig())
    x = jax.random.normal(jax.random.key(1), (4, 200, 16), jnp.bfloat16)
    _, routed = jax.jit(lambda x: moe.routed(x, jnp.ones((4, 200), bool)))(x)
    logits = jnp.einsum("GSM,ME->GSE", x.astype(jnp.float32), moe.gate, precision="highest")
    want, _ = route(logits, 50, GatingConfig())
    np.testing.assert_array_equal(routed.routing.expert, want.expert)
    np.testing.assert_array_equal(routed.routing.slot, want.slot)


def test_relu_needs_its_result_only():
    x = jnp.array([-1.0, 0.0, 2.0])
    np.testing.assert_array_equal(relu(x), jax.nn.relu(x))
    np.testing.assert_array_equal(jax.grad(lambda x: relu(x).sum())(x), [0, 0, 1])


def test_hashed_bits_are_even_and_independent():
    bits = np.asarray(hashed_bits(SEED, (64, 1024)))
    ones = np.unpackbits(bits.view(np.uint8)).reshape(bits.size, 32)
    assert np.abs(ones.mean(0) - 0.5).max() < 0.01
    signs = 2.0 * (bits >> 31) - 1
    for shift in (1, 2, 64, 1024):
        assert abs(np.mean(signs.ravel()[shift:] * signs.ravel()[:-shift])) < 0.02
    other = np.asarray(hashed_bits(SEED + 1, (64, 1024)))
    assert abs(np.mean(signs * (2.0 * (other >> 31) - 1))) < 0.02
    assert len(np.unique(bits)) > 0.99 * bits.size


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_hash_dropout_drops_a_share_and_the_same_backward(rate):
    x = jnp.ones((100, 331))
    seed = seed_of(jax.random.key(0))
    y = hash_dropout(x, seed, rate)
    assert abs(np.mean(y == 0) - rate) < 0.01
    np.testing.assert_allclose(np.unique(y), [0, 1 / (1 - rate)], rtol=1e-6)
    grad = jax.grad(lambda x: jnp.sum(hash_dropout(x, seed, rate)))(x)
    np.testing.assert_array_equal(grad, y)


def test_rounding_is_right_on_average_and_exact_where_it_can_be():
    x = jnp.full((400, 500), 1.0 + 2**-10)  # an eighth of the way to the next bfloat16
    rounded = np.float32(round_stochastically(x, SEED))
    assert set(np.unique(rounded)) == {1.0, 1.0078125}
    assert abs(rounded.mean() - (1.0 + 2**-10)) < 1e-4
    exact = jnp.asarray(np.random.default_rng(0).normal(size=1000), jnp.bfloat16)
    np.testing.assert_array_equal(round_stochastically(exact.astype(jnp.float32), SEED), exact)
