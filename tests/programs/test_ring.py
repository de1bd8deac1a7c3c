"""Attention over split sequences: keys come round where they would not fit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from examples.recipes import context_parallel
from examples.recipes.transformer import Size
from gshard.rules import ring_pass
from tests.oracle import annotated, assert_same, even_split, kinds, random_array, run, sent

BY_POSITION = even_split(4, 1, 8)
LITTLE, MUCH = 64, 2**30  # bytes of a gathered operand


def plain(q, k, v):
    logits = jnp.einsum("bqnh,bknh->bnqk", q, k) / q.shape[-1] ** 0.5
    return jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(logits), v)


def causal(q, k, v):
    logits = jnp.einsum("bqnh,bknh->bnqk", q, k)
    logits = jnp.where(jnp.tril(jnp.ones(logits.shape[-2:], bool)), logits, -1e9)
    return jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(logits), v)


def strictly_causal(q, k, v):
    """Without the query's own position: the first query sees nothing."""
    logits = jnp.einsum("bqnh,bknh->bnqk", q, k)
    logits = jnp.where(jnp.tril(jnp.ones(logits.shape[-2:], bool), -1), logits, -1e9)
    return jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(logits), v)


def of_jax(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def windowed(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, local_window_size=(3, 0))


def with_bias(q, k, v):
    bias = -jnp.abs(jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])) / 3.0
    return jax.nn.dot_product_attention(q, k, v, bias=bias[None, None])


def in_segments(q, k, v):
    segment = jnp.arange(q.shape[1]) // 5
    same = segment[:, None] == segment
    return jax.nn.dot_product_attention(q, k, v, mask=same[None, None])


def capped(q, k, v):
    logits = 2 * jnp.tanh(jnp.einsum("bqnh,bknh->bnqk", q, k) / 2)
    powers = jnp.exp(logits - jnp.max(logits, -1, keepdims=True))
    return jnp.einsum("bnqk,bknh->bqnh", powers / powers.sum(-1, keepdims=True), v)


def without_softmax(q, k, v):
    weights = jax.nn.sigmoid(jnp.einsum("bqnh,bknh->bnqk", q, k))
    return jnp.einsum("bnqk,bknh->bqnh", weights, v)


SLOW = pytest.mark.slow
LAYERS = [plain, causal, of_jax, windowed, with_bias, in_segments, capped, without_softmax]


OTHERS = [f for f in LAYERS if f is not of_jax]


def trained(layer, *args):
    """A loss and its gradients."""

    def loss(*args):
        y = layer(*args)
        return jnp.sum(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape).astype(y.dtype))

    return jax.value_and_grad(loss, argnums=tuple(range(len(args))))(*args)


def check(fn, *args, inputs=(BY_POSITION,) * 3, limit=LITTLE, tolerance=1e-4):
    """Assert the unpartitioned values; the lowered program."""
    wanted = jax.jit(fn)(*args)
    jitted = gshard.jit(annotated(fn, inputs), devices=jax.devices()[:8], memory_limit=limit)
    close = {"rtol": tolerance, "atol": tolerance}
    assert_same(run(jitted, *args, **close), wanted, **close)
    return jitted.lower(*args)


def tensors(length=32, heads=3, keys=3, dtype=np.float32):
    """Queries, keys and values."""
    return [
        random_array((2, length, n, 4), dtype, seed=i) for i, n in enumerate([heads, keys, keys])
    ]


@pytest.mark.parametrize(
    "layer", [f if f in (causal, of_jax) else pytest.param(f, marks=SLOW) for f in LAYERS]
)
def test_keys_and_values_go_round_once(layer):
    lowered = check(layer, *tensors())
    gathered = check(layer, *tensors(), limit=MUCH)
    assert set(kinds(lowered)) == {"collective_permute"}
    moved = [c for c in lowered.collectives if c.dtype == "float32"]  # positions may go round too
    assert sum(c.count for c in moved) == 2 * 7
    assert sum(c.total_bytes for c in moved) == sent(gathered)


@pytest.mark.parametrize("layer", [of_jax, *(pytest.param(f, marks=SLOW) for f in OTHERS)])
def test_gradients_go_round_with_their_keys(layer):
    lowered = check(functools.partial(trained, layer), *tensors())
    assert set(kinds(lowered)) == {"collective_permute", "all_reduce"}
    assert sent(lowered, "all_reduce") < 16  # the loss
    rounds = 3 if layer is capped else 2  # with one for the gradient of its maximum
    moved = [c for c in lowered.collectives if c.kind == "collective_permute"]
    floats = sum(c.count for c in moved if c.dtype == "float32")
    assert floats <= (2 * rounds + 2) * 7 + 2  # keys and values, and once their gradients


@pytest.mark.parametrize(
    "layer", [causal, pytest.param(of_jax, marks=SLOW), pytest.param(in_segments, marks=SLOW)]
)
def test_lengths_that_do_not_divide(layer):
    check(functools.partial(trained, layer), *tensors(length=29))


@SLOW
def test_bfloat16_with_a_softmax_in_float32():
    check(of_jax, *tensors(dtype=jnp.bfloat16))


@SLOW
def test_weights_in_bfloat16_that_are_divided_after_the_product():
    def layer(q, k, v):
        logits = jnp.einsum("bqnh,bknh->bnqk", q, k)
        powers = jnp.exp(logits - jnp.max(logits, -1, keepdims=True))
        summed = jnp.einsum("bnqk,bknh->bnqh", powers.astype(jnp.bfloat16), v)
        return summed / jnp.sum(powers, -1, keepdims=True)

    q, k, v = tensors()
    lowered = check(layer, q, k, v.astype(jnp.bfloat16), tolerance=0.05)
    assert set(kinds(lowered)) == {"collective_permute"}


@SLOW
def test_grouped_queries():
    lowered = check(functools.partial(trained, of_jax), *tensors(heads=6, keys=2))
    assert set(kinds(lowered)) == {"collective_permute", "all_reduce"}


@SLOW
def test_queries_without_a_key():
    """Rows that are masked throughout weigh all values alike, as they do unpartitioned."""

    def layer(q, k, v):
        seen = (jnp.arange(q.shape[1]) % 3 > 0)[:, None] & (jnp.arange(k.shape[1]) < 9)
        logits = jnp.einsum("bqnh,bknh->bnqk", q, k)
        return jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(jnp.where(seen, logits, -1e9)), v)

    check(functools.partial(trained, layer), *tensors())


@SLOW
@pytest.mark.parametrize("remat", [False, True])
def test_layers(remat):
    def layers(x):
        attend = jax.checkpoint(of_jax) if remat else of_jax
        for _ in range(2):
            x = x + attend(x, 2 * x, x / 2)
        return x

    lowered = check(functools.partial(trained, layers), tensors()[0], inputs=[BY_POSITION])
    assert set(kinds(lowered)) == {"collective_permute", "all_reduce"}


@SLOW
def test_layers_in_a_scan_with_remat():
    def layers(x):
        step = jax.checkpoint(lambda x, _: (x + of_jax(x, 2 * x, x / 2), None))
        return jax.lax.scan(step, x, length=3)[0]

    lowered = check(functools.partial(trained, layers), tensors()[0], inputs=[BY_POSITION])
    assert set(kinds(lowered)) == {"collective_permute", "all_reduce"}


@SLOW
def test_batch_and_positions_on_a_mesh():
    both = np.arange(8).reshape(2, 4, 1, 1)
    lowered = check(functools.partial(trained, of_jax), *tensors(), inputs=[both] * 3)
    assert set(kinds(lowered)) == {"collective_permute", "all_reduce"}


@pytest.mark.parametrize("layer", [causal, of_jax, strictly_causal])
@pytest.mark.parametrize("backwards", [False, pytest.param(True, marks=SLOW)])
def test_blocks_that_a_mask_hides_are_not_computed(layer, backwards, monkeypatch):
    """A query that sees nothing weighs all keys alike: its device needs them all."""
    runs = []
    added = ring_pass._Round.added

    def counted(self, *args):
        jax.debug.callback(lambda: runs.append(self.ring.softmax is not None))
        return added(self, *args)

    monkeypatch.setattr(ring_pass._Round, "added", counted)
    fn = functools.partial(trained, layer) if backwards else layer
    jitted = gshard.jit(annotated(fn, [BY_POSITION] * 3), memory_limit=LITTLE)
    jax.block_until_ready(jitted(*tensors()))
    jax.effects_barrier()
    blocks = 8 * 9 // 2 + 7 * (layer is strictly_causal)
    assert sum(runs) == blocks
    assert len(runs) == (2 if backwards else 1) * blocks  # a softmax, and what comes back, once


def test_weights_that_are_a_result_are_not_in_a_ring():
    def layer(q, k, v):
        weights = jax.nn.softmax(jnp.einsum("bqnh,bknh->bnqk", q, k))
        return weights, jnp.einsum("bnqk,bknh->bqnh", weights, v)

    check(layer, *tensors(), limit=600)


def test_large_results_of_other_products_stay_as_they_are():
    """Splitting weights and tokens alike is not attention, however large the hidden layer is."""

    def layer(x, up, down):
        return jax.nn.gelu(x @ up) @ down

    shapes = [(64, 8), (8, 512), (512, 8)]
    split = [even_split(2, 0, 8), even_split(2, 1, 8), even_split(2, 0, 8)]
    lowered = check(layer, *[random_array(s) for s in shapes], inputs=split, limit=4 * 8 * 512 - 1)
    assert "collective_permute" not in kinds(lowered)


@SLOW
def test_no_device_has_all_keys():
    """What XLA says that a device needs, beyond its own tiles of operands and results."""
    shapes = [jax.ShapeDtypeStruct((1, 2048, 2, 16), jnp.float32)] * 3

    def temporary(limit):
        step = functools.partial(trained, causal)
        jitted = gshard.jit(annotated(step, [BY_POSITION] * 3), memory_limit=limit)
        return jitted.lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    assert temporary(LITTLE) < temporary(MUCH) / 8


def test_the_recipe_in_a_ring():
    """Forwards the bytes of gathering, backwards keys and values come round once again."""
    (recipe,) = context_parallel.recipes(Size(L=1, V=128))
    lowered = gshard.jit(recipe.step, devices=8, memory_limit=2**18).lower(*recipe.arguments)
    assert not [c for c in lowered.collectives if c.kind == "all_gather"]
    assert sent(lowered) < 1.4 * recipe.expert
