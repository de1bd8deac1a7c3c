"""The attention kernel, in Pallas's interpreter, against plain attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

import gshard
from gshard.nn import attention as attention_module
from gshard.nn.attention import Attention
from gshard.nn.flash import (
    Blocks,
    Segments,
    flash_attention,
    joint_attention,
    reference,
    seed_from_row,
)
from gshard.nn.pair import Inputs, Layer, Masks
from gshard.nn.strategy import Strategy
from tests.nn import models

SEED = jnp.array([7, 11], jnp.uint32)
BLOCKS = Blocks(own=16, other=8, interpret=True)


def packed(rng, B, length):
    """Rows of a few sentences and padding; the last row is padding alone."""
    rows = np.zeros((B, length), np.int32)
    for row in rows[:-1]:
        cuts = np.sort(rng.choice(length, 3, replace=False))
        row[: cuts[0]], row[cuts[0] : cuts[1]], row[cuts[1] : cuts[2]] = 1, 2, 3
    return rows


def arrays(T, L, D=16, U=32, B=3, N=2, seed=0):
    rng = np.random.default_rng(seed)
    q, k, v = (
        jnp.float32(rng.normal(size=(B, length, N, dim)))
        for length, dim in ((T, D), (L, D), (L, U))
    )
    return q, k, v, packed(rng, B, T), packed(rng, B, L)


@pytest.mark.parametrize("rate", [pytest.param(0.0, marks=pytest.mark.slow), 0.3])
@pytest.mark.parametrize(
    ("T", "L", "causal"),
    [
        pytest.param(32, 32, True, marks=pytest.mark.slow),
        pytest.param(32, 24, False, marks=pytest.mark.slow),
        (37, 37, True),
        pytest.param(5, 19, False, marks=pytest.mark.slow),
    ],
)
def test_kernel_is_the_reference(T, L, causal, rate):
    """Lengths that are no multiple of a block, rows of padding alone, forward and backward."""
    q, k, v, q_seg, k_seg = arrays(T, L)
    segments = Segments(q_seg, q_seg if causal else k_seg, causal)
    if causal:
        k, v = k[:, :T], v[:, :T]

    def value(attend):
        def f(q, k, v):
            out = attend(q, k, v)
            return jnp.sum(jnp.sin(out)), out

        return jax.jit(jax.value_and_grad(f, (0, 1, 2), has_aux=True))(q, k, v)

    got = value(lambda q, k, v: flash_attention(q, k, v, segments, rate, SEED, BLOCKS))
    want = value(lambda q, k, v: reference(q, k, v, segments, rate, SEED))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)
    assert np.all(got[0][1][-1] == 0)  # padding sees nothing


@pytest.mark.parametrize("rate", [pytest.param(0.0, marks=pytest.mark.slow), 0.3])
@pytest.mark.parametrize(
    ("parts", "T", "L", "causal"),
    [
        ((3,), 19, 19, True),
        pytest.param((3,), 32, 32, False, marks=pytest.mark.slow),
        ((1, 2), 5, 19, False),
        pytest.param((1, 2), 37, 23, False, marks=pytest.mark.slow),
        pytest.param((2, 1), 37, 37, True, marks=pytest.mark.slow),
    ],
)
def test_parts_of_arrays_are_attended_to_where_they_lie(parts, T, L, causal, rate):
    """What the kernels leave unwritten of the gradients would be NaN."""
    rng = np.random.default_rng(0)
    q_seg, k_seg = packed(rng, 2, T), packed(rng, 2, L)
    segments = Segments(q_seg, q_seg if causal else k_seg, causal)
    lengths = (T, L)[-len(parts) :]
    arrays = tuple(
        jnp.float32(rng.normal(size=(2, length, count, 3, 16)))
        for length, count in zip(lengths, parts, strict=True)
    )

    def value(attend):
        def f(arrays):
            out = attend(arrays)
            return jnp.sum(jnp.sin(out)), out

        return jax.jit(jax.value_and_grad(f, has_aux=True))(arrays)

    def plain(arrays):
        apart = (x[:, :, part] for x in arrays for part in range(x.shape[2]))
        return reference(*apart, segments, rate, SEED)

    got = value(lambda arrays: joint_attention(arrays, segments, rate, SEED, BLOCKS))
    want = value(plain)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


def test_there_are_three_parts():
    x = jnp.zeros((2, 8, 2, 3, 16))
    segments = Segments(np.ones((2, 8)), np.ones((2, 8)))
    with pytest.raises(ValueError, match=r"three parts.*\(2, 8, 2, 3, 16\) counts 2"):
        joint_attention((x,), segments, 0.0, SEED)


def interpreted(monkeypatch):
    def attend(*given):
        return joint_attention(*given, BLOCKS)

    monkeypatch.setattr(attention_module, "joint_attention", attend)


@pytest.mark.slow
@pytest.mark.parametrize("value_dim", [8, 16])
@pytest.mark.parametrize("cross", [False, True])
def test_attention_by_the_kernel_is_the_plain_one(cross, value_dim, monkeypatch):
    """Self-attention and cross-attention, with parts together and apart."""
    interpreted(monkeypatch)
    rng = np.random.default_rng(0)
    T, L, M = 19, 23 if cross else 19, 12
    x, source = (jnp.float32(rng.normal(size=(2, n, M))) for n in (T, L))
    visible = Segments(packed(rng, 2, T), packed(rng, 2, L))
    if not cross:
        source, visible = None, Segments(visible.queries, visible.queries, causal=True)
    seen = jnp.any(visible.mask(), axis=-1)[..., None]

    def value(kind):
        def f(attention, x, source):
            out = jnp.where(seen, attention(x, source, visible, kind=kind), 0)
            return jnp.sum(jnp.sin(out)), out

        attention = Attention(M, 3, 16, value_dim, "float32", jax.random.key(1))
        return jax.jit(jax.value_and_grad(f, (0, 1, 2), has_aux=True))(attention, x, source)

    for a, b in zip(*(jax.tree.leaves(value(kind)) for kind in ("flash", "plain")), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


def equations(jaxpr):
    """Those of the jaxpr and of all that it calls, but not of kernels."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        if eqn.primitive.name != "pallas_call":
            for inner in jaxprs_in_params(eqn.params):
                yield from equations(inner)


@pytest.mark.parametrize(("value_dim", "products"), [(16, 2 + 3 + 2), (8, 4 + 4 + 2)])
def test_one_product_for_each_input(value_dim, products, monkeypatch):
    """In a decoder layer: of self-attention, of cross-attention, of the feed-forward layer.

    Each has one for the gradient of its input and one for that of its weights, and no array of
    queries, keys or values is cut or put together.
    """
    interpreted(monkeypatch)
    config = models.config(key_dim=16, value_dim=value_dim).tuned()
    layer = Layer(config, jax.random.key(0), sparse=False, cross=True)
    x, source = jnp.ones((2, 16, 16)), jnp.ones((2, 32, 16))
    target, seen = np.ones((2, 16), np.int32), np.ones((2, 32), np.int32)
    masks = Masks(target, Segments(target, target, causal=True), Segments(target, seen))

    def f(layer, x, source):
        return jnp.sum(layer(x, Inputs(masks, source))[0])

    found = list(equations(jax.make_jaxpr(jax.grad(f, (0, 1, 2)))(layer, x, source)))
    assert sum(eqn.primitive.name == "dot_general" for eqn in found) == 3 * products
    assert sum(eqn.primitive.name == "pallas_call" for eqn in found) == 2 * 3
    for eqn in found:
        if eqn.primitive.name in ("slice", "concatenate", "pad", "gather", "dynamic_slice"):
            assert all(atom.aval.ndim < 5 for atom in (*eqn.invars, *eqn.outvars))


def test_reference_is_plain_attention_where_there_is_something_to_see():
    x = jax.random.normal(jax.random.key(0), (3, 12, 8))
    segments = packed(np.random.default_rng(0), 3, 12)
    visible = Segments(segments, segments, causal=True)
    attention = Attention(8, 2, 4, 4, "float32", jax.random.key(1))
    memory = attention.keys_values(x)
    want = attention(x, memory, visible.mask())
    np.testing.assert_array_equal(attention(x, memory, visible), want)
    got = attention(x, memory, visible, kind="flash")
    np.testing.assert_array_equal(attention(x, None, visible.mask()), want)
    seen = np.asarray(visible.mask().any(-1))
    np.testing.assert_allclose(got[seen], want[seen], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_dropout_drops_its_share_of_the_weights():
    q, k, _, segments, _ = arrays(64, 64, N=4)
    segments = np.ones_like(segments)
    v = jnp.broadcast_to(jnp.eye(64)[None, :, None], (3, 64, 4, 64))  # the weights themselves
    weights = reference(q, k, v, Segments(segments, segments), 0.0, SEED)
    for attend in (reference, lambda *a: flash_attention(*a, BLOCKS)):
        dropped = np.asarray(attend(q, k, v, Segments(segments, segments), 0.2, SEED))
        assert abs(np.mean(dropped == 0) - 0.2) < 0.01
        np.testing.assert_allclose(dropped, (dropped > 0) * weights / 0.8, rtol=1e-4)


def test_blocks_that_nobody_sees_are_left_out():
    """NaN in a sentence that others do not see stays there, block by block."""
    q, k, v, _, _ = arrays(32, 32)
    segments = np.repeat(np.arange(1, 5), 8)[None].repeat(3, 0).astype(np.int32)
    v = v.at[:, 24:].set(jnp.nan)
    out = flash_attention(q, k, v, Segments(segments, segments), 0.0, SEED, BLOCKS._replace(own=8))
    assert np.all(np.isfinite(out[:, :24]))
    assert np.all(np.isnan(out[:, 24:]))


@pytest.mark.slow
def test_a_part_of_a_batch_draws_what_the_whole_does():
    q, k, v, segments, _ = arrays(16, 16, B=5)
    segments = np.ones_like(segments)
    whole = reference(q, k, v, Segments(segments, segments), 0.5, SEED)
    part = slice(3, 5)
    seed = seed_from_row(SEED, jnp.asarray(3), q.shape[2])
    seen = Segments(segments[part], segments[part])
    got = reference(q[part], k[part], v[part], seen, 0.5, seed)
    np.testing.assert_allclose(got, whole[part], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("devices", [1, 8])
def test_kernel_runs_under_gshard_jit(devices):
    """On one device as it is; on several in a manual region, each on its own rows."""
    strategy = Strategy(devices)
    q, k, v, _, _ = arrays(16, 16, B=8)
    segments = np.ones((8, 16), np.int32)

    def attend(q, k, v, segments):
        own = [strategy.own_groups(x) for x in (q, k, v, segments)]
        blocks = Blocks(16, 16, interpret=True)
        out = flash_attention(*own[:3], Segments(own[3], own[3]), 0.0, SEED, blocks)
        return jnp.sum(jnp.sin(strategy.all_groups(out, 8)))

    def plain(q, k, v, segments):
        out = reference(q, k, v, Segments(segments, segments), 0.0, SEED)
        return jnp.sum(jnp.sin(out))

    run = gshard.jit(jax.value_and_grad(attend), devices=jax.devices()[:devices])
    want = jax.jit(jax.value_and_grad(plain))(q, k, v, segments)
    for a, b in zip(run(q, k, v, segments), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)
