"""Pallas kernels, interpreted: batch dims of the grid are free, manual regions run them as is."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import gshard
from tests.oracle import check, even_split, kinds, random_array, sent

INTERPRETED = {"interpret": True}


def softmax_rows(x):
    """A block of rows for each program; the kernel does not ask for its number."""

    def kernel(x_ref, o_ref):
        x = x_ref[...]
        e = jnp.exp(x - x.max(-1, keepdims=True))
        o_ref[...] = e / e.sum(-1, keepdims=True)

    rows, n = x.shape
    spec = pl.BlockSpec((4, n), lambda i: (i, 0))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    call = pl.pallas_call(
        kernel, out_shape=shape, grid=(rows // 4,), in_specs=[spec], out_specs=spec, **INTERPRETED
    )
    return call(x)


def numbered(x):
    """Each program adds its number: the grid cannot be cut."""

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + pl.program_id(0).astype(jnp.float32)

    spec = pl.BlockSpec((1, x.shape[1]), lambda i: (i, 0))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    call = pl.pallas_call(
        kernel, out_shape=shape, grid=x.shape[:1], in_specs=[spec], out_specs=spec, **INTERPRETED
    )
    return call(x)


def summed(x, y):
    """Programs along the second dim of the grid add to one block: a matrix product by parts."""

    def kernel(x_ref, y_ref, o_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += x_ref[...] @ y_ref[...]

    m, k = x.shape
    shape = jax.ShapeDtypeStruct((m, y.shape[1]), x.dtype)
    call = pl.pallas_call(
        kernel,
        out_shape=shape,
        grid=(m // 2, k // 4),
        in_specs=[
            pl.BlockSpec((2, 4), lambda i, j: (i, j)),
            pl.BlockSpec((4, y.shape[1]), lambda i, j: (j, 0)),
        ],
        out_specs=pl.BlockSpec((2, y.shape[1]), lambda i, j: (i, 0)),
        **INTERPRETED,
    )
    return call(x, y)


@pytest.mark.parametrize("tiles", [2, 4, 8])
def test_blocks_of_rows_are_free(tiles):
    low = check(softmax_rows, random_array((32, 5)), inputs=[even_split(2, 0, tiles)])
    assert sent(low) == 0


@pytest.mark.parametrize(("rows", "tiles"), [(20, 8), (28, 3), (12, 8)])
def test_blocks_that_do_not_divide_are_aligned_first(rows, tiles):
    """Tiles of whole blocks only: rows pass between neighbours, or all is gathered."""
    check(softmax_rows, random_array((rows, 5)), inputs=[even_split(2, 0, tiles)])


def test_dims_inside_of_a_block_are_gathered():
    low = check(softmax_rows, random_array((32, 16)), inputs=[even_split(2, 1, 8)])
    assert "operand of pallas_call" in low.collectives[0].reason


def test_a_kernel_that_asks_for_its_number_runs_whole():
    low = check(numbered, random_array((16, 3)), inputs=[even_split(2, 0, 8)])
    assert kinds(low) == {"all_gather": 1}


def test_dims_that_vmap_added_are_free():
    x = random_array((13, 16, 3))
    low = check(jax.vmap(numbered), x, inputs=[even_split(3, 0, 8)])
    assert sent(low) == 0
    low = check(
        jax.vmap(jax.vmap(softmax_rows)),
        random_array((3, 5, 8, 4)),
        devices=6,
        inputs=[np.arange(6).reshape(3, 2, 1, 1)],
    )
    assert sent(low) == 0


def test_programs_that_share_a_block_stay_together():
    x, y = random_array((16, 8)), random_array((8, 3))
    low = check(summed, x, y, inputs=[even_split(2, 0, 8)], rtol=1e-4)
    assert sent(low) == 0
    low = check(summed, x, y, inputs=[even_split(2, 1, 8)], rtol=1e-4)
    assert sent(low) > 0


def test_in_a_manual_region():
    x = random_array((32, 5))

    def fn(x):
        assigned = np.arange(8).reshape(8, 1)
        part = gshard.auto_to_manual_spmd_partition(gshard.shard(x, assigned))
        return gshard.manual_to_auto_spmd_partition(softmax_rows(part), assigned)

    np.testing.assert_allclose(gshard.jit(fn)(x), softmax_rows(x), rtol=1e-5)
    assert sent(gshard.jit(fn).lower(x)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("dim", [0, 2])
def test_attention_over_batch_and_heads(dim):
    """JAX's own kernel, forwards."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # JAX 0.11: it moves to tokamax
        from jax.experimental.pallas.ops.gpu import attention
    q, k, v = (random_array((2, 32, 2, 16), seed=s) for s in range(3))
    sizes = attention.BlockSizes(
        block_q=16, block_k=16, block_q_dkv=16, block_kv_dkv=16, block_q_dq=16, block_kv_dq=16
    )

    def mha(q, k, v):
        return attention.mha(q, k, v, None, block_sizes=sizes, interpret=True)

    split = even_split(4, dim, 2)
    low = check(mha, q, k, v, devices=2, inputs=[split] * 3, rtol=1e-4, atol=1e-4)
    assert sent(low) == 0
