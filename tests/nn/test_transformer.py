import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from gshard.nn import Attention, Batch, GatingConfig, LayerNorm, Transformer, segment_mask
from gshard.nn.config import forward_flops
from tests.nn import models


@functools.lru_cache
def forward(**changes):
    model = models.model(models.config(**changes))
    return model, jax.jit(lambda model, batch: model(batch)[0])


def test_attention_is_the_textbooks():
    rng = np.random.default_rng(0)
    x, memory = rng.normal(size=(2, 3, 8)), rng.normal(size=(2, 5, 8))
    mask = rng.random((2, 3, 5)) < 0.7
    mask[..., 0] = True
    attention = Attention(8, 2, 3, 4, "float32", jax.random.key(0))
    got = jax.jit(lambda a, x, m: a(x, a.keys_values(m), mask))(
        attention, jnp.float32(x), jnp.float32(memory)
    )
    wq, wk, wv, wo = (np.asarray(w, np.float64) for w in jax.tree.leaves(attention))
    want = np.zeros((2, 3, 8))
    for b, n, t in np.ndindex(2, 2, 3):
        scores = (memory[b] @ wk[:, n]) @ (x[b, t] @ wq[:, n]) / np.sqrt(3)
        weights = np.exp(scores) * mask[b, t]
        want[b, t] += (weights / weights.sum()) @ (memory[b] @ wv[:, n]) @ wo[n]
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_segment_mask():
    segments = jnp.array([[1, 1, 2, 0]])
    want = [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    np.testing.assert_array_equal(segment_mask(segments, segments)[0], want)
    want = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    np.testing.assert_array_equal(segment_mask(segments, segments, causal=True)[0], want)


@pytest.mark.slow
@pytest.mark.parametrize("experts", [0, 4])
def test_the_future_and_padding_are_not_seen(experts):
    model, run = forward(experts=experts)
    batch = models.batch()
    logits = run(model, batch)
    changed = batch.inputs.copy()
    changed[:, 4:] = 7  # the future of positions 0 to 3, and padding in row 1
    source = np.where(batch.source_segments > 0, batch.source, 9)
    other = run(model, batch._replace(inputs=changed, source=source))
    np.testing.assert_allclose(other[:, :4], logits[:, :4], atol=1e-5)
    assert np.abs(other[0, 4:] - logits[0, 4:]).max() > 1e-2
    source = batch.source.copy()
    source[:, 0] = 3
    assert np.abs(run(model, batch._replace(source=source)) - logits).max() > 1e-3


@pytest.mark.slow
def test_packed_sequences_equal_separate_ones():
    model, run = forward()
    batch = models.batch()
    logits = run(model, batch)
    packed = Batch(*(x[[0, 2]].reshape(1, -1) for x in batch))
    segments = [np.repeat([[1, 2]], n, axis=1) for n in (8, 6)]
    packed = packed._replace(source_segments=segments[0], target_segments=segments[1])
    np.testing.assert_allclose(
        run(model, packed).reshape(2, 6, -1), logits[np.array([0, 2])], atol=1e-4
    )


@pytest.mark.slow
def test_decoding_step_by_step_equals_the_whole_forward_pass():
    model, run = forward()
    batch = models.batch()
    want = run(model, batch)
    B, T = batch.inputs.shape
    cache = jax.jit(lambda m: start(m, batch, T))(model)

    @jax.jit
    def step(model, cache, tokens, t):
        mask = jnp.broadcast_to(jnp.arange(T) <= t, (B, 1, T))
        positions = jnp.full((B, 1), t)
        return model.decode_step(tokens, positions, cache, t, mask, batch.source_segments > 0)

    for t in range(T):
        logits, cache = step(model, cache, batch.inputs[:, t : t + 1], t)
        real = batch.target_segments[:, t] > 0
        np.testing.assert_allclose(logits[real, 0], want[real, t], atol=1e-4)


def start(model, batch, length):
    memory, _ = model.encode(batch.source, batch.source_segments, batch.source_positions)
    return model.start_decoding(memory, length)


def test_flat_beam_follows_the_ancestry():
    """Two hypotheses in one buffer, the second branching off the first after one step."""
    model, run = forward()
    batch = models.batch()
    B, T, K = 4, 3, 2
    first = batch.inputs[:, :T]
    second = first.copy()
    second[:, 1:] = (second[:, 1:] + 3) % 19
    cache = jax.jit(lambda m: start(m, batch, K * T))(model)
    # Slot of step t, hypothesis k is t * K + k; both share hypothesis 0's first token.
    ancestors = {0: [0, 2, 4], 1: [0, 3, 5]}

    @jax.jit
    def step(model, cache, tokens, t, mask):
        positions = jnp.full((B, K), t)
        mask = jnp.broadcast_to(mask, (B, K, K * T))
        return model.decode_step(tokens, positions, cache, t * K, mask, batch.source_segments > 0)

    for t in range(T):
        mask = np.zeros((K, K * T), bool)
        for k in range(K):
            mask[k, ancestors[k][: t + 1]] = True
        mask[1, 0] = True
        tokens = np.stack([first[:, t], second[:, t]], axis=1)
        logits, cache = step(model, cache, tokens, t, mask)
    padded = np.zeros((2, 4, 6), np.int32)
    padded[:, :, :T] = [first, second]
    for k in range(K):
        want = run(model, batch._replace(inputs=padded[k]))[:, T - 1]
        np.testing.assert_allclose(logits[:, k], want, atol=1e-4)


def count_equations(jaxpr):
    total = 0
    for eqn in jaxpr.eqns:
        total += 1
        for sub in jaxprs_in_params(eqn.params):
            total += count_equations(sub)
    return total


@pytest.mark.slow
def test_program_size_does_not_grow_with_depth():
    def size(layers):
        config = models.config(encoder_layers=layers, decoder_layers=layers)
        loss = lambda model, batch: jnp.sum(model(batch, jax.random.key(0))[0])  # noqa: E731
        jaxpr = jax.make_jaxpr(jax.grad(loss))(models.shapes(config), models.batch())
        return count_equations(jaxpr.jaxpr)

    assert size(2) < 5000
    assert size(8) == size(4)


def test_layers_come_in_pairs():
    with pytest.raises(ValueError, match="3 encoder and 2 decoder layers"):
        models.config(encoder_layers=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "weight_dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)]
)
def test_bfloat16_stays_close_with_a_float32_router_and_softmax(weight_dtype):
    exact, run = forward()
    config = models.config(dtype="bfloat16", weight_dtype=weight_dtype)
    batch = models.batch()
    model = models.model(config)
    dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(model)}
    assert dtypes == {"float32", weight_dtype}
    jaxpr = jax.make_jaxpr(lambda m: m(batch)[0])(model)
    assert all(t == np.float32 for t in dtypes_of(jaxpr.jaxpr, "exp"))
    logits = jax.jit(lambda m: m(batch)[0])(model)
    assert logits.dtype == jnp.float32
    # A rounded router may send single tokens elsewhere: most logits are close.
    error = np.abs(logits - run(exact, batch))
    assert np.quantile(error, 0.9) < 0.1


def dtypes_of(jaxpr, primitive):
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == primitive:
            found.append(eqn.outvars[0].aval.dtype)
        for sub in jaxprs_in_params(eqn.params):
            found += dtypes_of(sub, primitive)
    return found


def test_layer_norm():
    x = np.random.default_rng(0).normal(3.0, 2.0, (2, 3, 8)).astype(np.float32)
    y = LayerNorm(8, "float32")(jnp.asarray(x))
    np.testing.assert_allclose(np.mean(y, -1), 0, atol=1e-5)
    np.testing.assert_allclose(np.std(y, -1), 1, rtol=1e-4)


@pytest.mark.slow
def test_initial_weights_have_the_scale_of_their_fan_in():
    config = models.config(model_dim=64, hidden_dim=96, encoder_layers=4)
    model = jax.jit(Transformer, static_argnums=0)(config, jax.random.key(0, impl="rbg"))
    layer = model.encoder.sparse
    assert layer.moe.experts.wi.shape == (2, 4, 64, 96)
    for weight, fan_in in [
        (layer.moe.experts.wi, 64),
        (layer.moe.experts.wo, 96),
        (layer.self_attention.wq, 64),
        (layer.self_attention.wo, 20),
        (model.source.table, 64),
    ]:
        np.testing.assert_allclose(np.std(weight), fan_in**-0.5, rtol=0.07)
    assert np.abs(layer.moe.experts.wi[0] - layer.moe.experts.wi[1]).max() > 0.1


@pytest.mark.slow
def test_dropless_results_do_not_depend_on_batch_and_padding():
    """With a capacity of one slot a batch of four shares few experts; alone nothing is shared."""
    gating = GatingConfig(eval_capacity_factor=0.1)
    model = models.model(models.config(gating=gating, groups=1))
    batch = models.batch()

    @jax.jit
    def encode(model, source, segments, positions):
        return model.encode(source, segments, positions, dropless=True)[0]

    together = encode(model, *batch[:3])
    alone = encode(model, *(x[1:2, :5] for x in batch[:3]))
    np.testing.assert_allclose(together[1:2, :5], alone, atol=1e-5)
    dropped = jax.jit(lambda m: m.encode(*batch[:3])[0])(model)
    assert np.abs(dropped - together).max() > 1e-2


@pytest.mark.slow
def test_routings_are_where_the_tokens_go():
    model = models.model(models.config(encoder_layers=4))
    batch = models.batch()
    routings = jax.jit(Transformer.routings)(model, batch)
    metrics = jax.jit(lambda m, b: m(b, dropless=True)[1])(model, batch)
    for routing, sums, real in zip(
        routings, metrics, (batch.source_segments > 0, batch.target_segments > 0), strict=True
    ):
        layers = len(sums.load)
        assert routing.expert.shape == (layers, 2, *real.shape)
        np.testing.assert_allclose(routing.weight.sum(1), np.tile(real, (layers, 1, 1)), atol=1e-5)
        assert (routing.weight[:, 0] >= routing.weight[:, 1]).all()
        assert (routing.expert[:, 0] != routing.expert[:, 1]).all()
        for layer in range(layers):
            chosen = np.asarray(routing.expert[layer])[:, real]
            counts = np.bincount(chosen.ravel(), minlength=4)
            np.testing.assert_allclose(sums.load[layer], counts / counts.sum(), rtol=1e-5)
    assert routings.encoder.expert.shape[0] == 2
    dense = models.model(models.config(experts=0))
    assert jax.jit(Transformer.routings)(dense, batch) == (None, None)


@pytest.mark.parametrize("stacked", [True, False])
def test_experts_in_the_encoder_alone_leave_the_decoder_its_arithmetic(stacked):
    config = models.config(experts_in="encoder", stacked=stacked)
    both = models.config(stacked=stacked)
    model = models.shapes(config)
    _, metrics = jax.eval_shape(lambda model, batch: model(batch), model, models.batch())
    assert metrics.encoder is not None
    assert metrics.decoder is None
    pair = model.decoder if stacked else model.decoder[0]
    assert pair.sparse.moe is None
    assert pair.sparse.feed_forward.wi.shape[-2:] == (16, 2 * 24)
    gates = 2 * config.model_dim * config.experts
    source, target = forward_flops(both)
    assert forward_flops(config) == (source, target - gates)
    without = [models.shapes(models.config(experts=0, experts_in=x)) for x in ("both", "encoder")]
    sizes = [[leaf.shape for leaf in jax.tree.leaves(model)] for model in without]
    assert sizes[0] == sizes[1]
