"""Reproducible products: which are added before they are reduced, and what computes them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import gshard
from gshard.reproducible import products
from tests.oracle import annotated, even_split, random_array, sent
from tests.reproducible.test_order import bits, leaves, product, tree


def test_a_sum_over_8_devices_for_a_result_in_4_parts_is_scattered_and_gathered_in_pairs():
    """As gradients under HSDP: the subtrees are exchanged, and two eighths are sent on."""
    x, y = random_array((192, 256)), random_array((192, 512), seed=1)
    half = np.arange(4).reshape(4, 1)  # and copies on the other four devices

    def fn(x, y):
        return gshard.shard(x.T @ y, half)

    where = [even_split(2, 0, 8)] * 2
    lowered = gshard.jit(annotated(fn, where), devices=8, reproducible=True).lower(x, y)
    size = 256 * 512 * 4
    assert sent(lowered) <= size * 7 // 8 + size * 2 // 8
    got = bits(fn, x, y, devices=8, inputs=where)
    np.testing.assert_array_equal(np.asarray(got), product(np.ascontiguousarray(x.T), y))


def test_rows_that_no_leaf_is_made_of_are_exchanged_for_leaves():
    """As gradients under context parallelism: leaves are parts of the batch, devices split rows."""
    x, y = random_array((8, 24, 32)), random_array((8, 24, 16), seed=1)

    def fn(x, y):
        return jnp.einsum("bsm,bsf->mf", x, y)

    where = [even_split(3, 1, 8)] * 2
    lowered = gshard.jit(annotated(fn, where), devices=8, reproducible=True).lower(x, y)
    operands, result = (x.nbytes + y.nbytes) // 8, 32 * 16 * 4
    assert [c.kind for c in lowered.collectives] == ["all_to_all"] * 3 + ["all_gather"]
    assert sent(lowered) == (operands + 2 * result) * 7 // 8
    got = bits(fn, x, y, devices=8, inputs=where)
    wanted = product(np.ascontiguousarray(x.reshape(-1, 32).T), y.reshape(-1, 16))
    np.testing.assert_array_equal(np.asarray(got), wanted)


def test_the_gradient_of_a_kernel_has_leaves_along_the_largest_dim():
    """Images are split there, and only what a usual sum sends is sent."""
    x, kernel = random_array((2, 8, 64, 4)), random_array((3, 3, 4, 4), seed=1)

    def fn(x, kernel):
        numbers = ("NHWC", "HWIO", "NHWC")

        def loss(kernel):
            y = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)
            return jnp.sum(y * y)

        return jax.grad(loss)(kernel)

    where = [even_split(4, 2, 8)]
    column, parts = 2 * 8 * 4 * 4, 2 * kernel.nbytes
    step = gshard.jit(annotated(fn, where), devices=8, reproducible=True).lower(x, kernel)
    assert sent(step) <= 4 * column + parts


@pytest.mark.parametrize("annotated_inside", [False, True])
def test_products_that_are_added_have_one_tree_and_one_reduction(annotated_inside):
    """Also through a residual, transposes and annotations."""
    a, b, c, d = (random_array(s, seed=i) for i, s in enumerate([(192, 8), (192, 16)] * 2))
    x = random_array((8, 16), seed=9)

    def fn(a, b, c, d, x):
        first = gshard.replicate(a.T @ b) if annotated_inside else a.T @ b
        return x + first + (d.T @ c).T

    parts = [
        [product(u, v) for u, v in zip(leaves(a.T, 1), leaves(b, 0), strict=True)],
        [product(u, v) for u, v in zip(leaves(c.T, 1), leaves(d, 0), strict=True)],
    ]
    wanted = x + tree([u + v for u, v in zip(*parts, strict=True)])
    split = even_split(2, 0, 8)
    step = gshard.jit(annotated(fn, [split] * 4), devices=8, reproducible=True).lower(a, b, c, d, x)
    assert sent(step) == 2 * 8 * 16 * 4 * 7 // 8
    for devices in (1, 8):
        where = [even_split(2, 0, devices)] * 4
        got = bits(fn, a, b, c, d, x, devices=devices, inputs=where)
        np.testing.assert_array_equal(np.asarray(got), wanted)


def test_a_product_without_a_library_rounds_every_operation(monkeypatch):
    """Where kernels differ by size: a loop over the contracted rows."""
    monkeypatch.setattr(products, "shared_multiple", lambda: 0)
    x, y = random_array((5, 48)), random_array((48, 3), seed=1)

    def chain(a, b):
        total = np.zeros((5, 3), np.float32)
        for i in range(a.shape[1]):
            total = total + a[:, i : i + 1] * b[i : i + 1]
        return total

    wanted = tree([chain(a, b) for a, b in zip(leaves(x, 1, 24), leaves(y, 0, 24), strict=True)])
    for devices in (1, 2, 3):
        where = [even_split(2, 1, devices), even_split(2, 0, devices)]
        got = bits(jnp.matmul, x, y, devices=devices, inputs=where)
        np.testing.assert_array_equal(np.asarray(got), wanted)


def test_sizes_whose_products_have_other_kernels_are_noticed(monkeypatch):
    """A library that has another kernel below 30 rows."""

    def by_size(pairs):
        return [np.full((len(x), x.shape[1], y.shape[2]), x.shape[1] < 30) for x, y in pairs]

    monkeypatch.setattr(products, "_products", by_size)
    found = [m for m in products.MULTIPLES if products.have_one_kernel(m)]
    assert found == [48, 64]
