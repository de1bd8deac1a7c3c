"""Blocks of rows by their experts: the loop and the kernels against einsums.

Where there is a GPU its kernels run; elsewhere JAX interprets them, from 0.11 on.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from gshard.nn.grouped import TILES, Tiles, feed_forward, fits
from gshard.nn.int8 import Int8

ON_GPU = jax.default_backend() == "gpu"
INTERPRETER = getattr(plgpu, "InterpretGPUParams", None)  # JAX 0.10's cannot transpose
EXPERTS = jnp.array([0, 2, 2, 4], jnp.int32)  # one without a block, a block without an expert
needs_kernels = pytest.mark.skipif(
    not (ON_GPU or INTERPRETER), reason="no GPU, and no interpreter of its kernels"
)


def reference(x_NCM, wi, wo, expert_N, keep_NCH=1):
    """By einsums with a copy of each block's weights."""
    E = len(wi)
    wi, wo = (w[jnp.minimum(expert_N, E - 1)].astype(x_NCM.dtype) for w in (wi, wo))
    h = jnp.maximum(jnp.einsum("NCM,NMH->NCH", x_NCM, wi), 0) * keep_NCH
    y = jnp.einsum("NCH,NHM->NCM", h, wo)
    return jnp.where((expert_N < E)[:, None, None], y, 0)


def draw(dtype, *shape):
    values = np.random.default_rng(sum(shape)).normal(size=shape) * shape[-2] ** -0.5
    return jnp.asarray(values, dtype)


def given(rows, M, H, dtype):
    keep = jnp.asarray(np.random.default_rng(0).integers(0, 2, (4, rows, H)) * 2, dtype)
    return draw(dtype, 4, rows, M), draw(dtype, 4, M, H), draw(dtype, 4, H, M), keep


def value_and_grads(fn, *given):
    y, pull = jax.vjp(fn, *given)
    return y, *pull(jnp.cos(y.astype(jnp.float32)).astype(y.dtype))


@pytest.mark.parametrize("dropout", [False, True])
@jax.default_matmul_precision("highest")  # products of float32 are those of fewer bits on a GPU
def test_the_loop_is_the_einsums(dropout):
    x, wi, wo, keep = given(8, 6, 10, jnp.float32)
    keep = keep if dropout else None
    got, want = (
        value_and_grads(lambda *a, fn=fn: fn(*a, EXPERTS, *([keep] if dropout else [])), x, wi, wo)
        for fn in (feed_forward, reference)
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert not np.asarray(got[0])[3].any()
    wi, wo = (Int8.of(w, (-2,)) for w in (wi, wo))
    np.testing.assert_allclose(
        feed_forward(x, wi, wo, EXPERTS), reference(x, wi, wo, EXPERTS), rtol=1e-4, atol=1e-5
    )


def near(got, want, rough):
    """As near to float32's as the plain form in bfloat16 is."""
    for a, b, c in zip(got, want, rough, strict=True):
        a, b, c = (np.asarray(x, np.float32) for x in (a, b, c))
        off, length = np.linalg.norm(a - b), np.linalg.norm(b)
        assert off <= 1.5 * np.linalg.norm(c - b) + 1e-3 * length
        assert off <= 0.02 * length


def dims_and_tiles():
    if ON_GPU:
        return (256, 512), TILES
    return (128, 128), Tiles(columns=128, programs=1, interpret=INTERPRETER())


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("rows", [64, 128])
def test_the_kernels_with_gradients(rows):
    dims, tiles = dims_and_tiles()
    x, wi, wo, _ = given(rows, *dims, jnp.bfloat16)
    assert fits(x, wi, wo) == ON_GPU

    def plain(*given):
        return reference(*given, EXPERTS)

    got = jax.jit(
        lambda *a: value_and_grads(lambda *b: feed_forward(*b, EXPERTS, None, tiles), *a)
    )(x, wi, wo)
    with jax.default_matmul_precision("highest"):
        want = value_and_grads(plain, *(a.astype(jnp.float32) for a in (x, wi, wo)))
    near(got, want, value_and_grads(plain, x, wi, wo))
    assert not np.asarray(got[0])[3].any()
    assert not np.asarray(got[2])[1].any()


@pytest.mark.slow
@needs_kernels
def test_the_kernels_on_weights_of_8_bits():
    dims, tiles = dims_and_tiles()
    x, *weights, _ = given(64, *dims, jnp.bfloat16)
    wi, wo = (Int8.of(w, (-2,)) for w in weights)
    got = jax.jit(lambda x: feed_forward(x, wi, wo, EXPERTS, None, tiles))(x)
    want = reference(x.astype(jnp.float32), wi, wo, EXPERTS)
    near([got], [want], [reference(x, wi, wo, EXPERTS)])


@pytest.mark.parametrize("rows", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_the_kernels_lower_for_hopper_on_any_machine(rows):
    """Shapes, layouts and shared memory are checked there; six products with gradients."""
    shapes = [(3, rows, 256), (2, 256, 512), (2, 512, 256)]
    given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    expert = jnp.array([0, 1, 2], jnp.int32)

    def grads(*given):
        def total(*given):
            return feed_forward(*given, expert, None, TILES).astype(jnp.float32).sum()

        return jax.grad(total, (0, 1, 2))(*given)

    text = jax.jit(grads).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu") >= 5  # y itself is not needed
