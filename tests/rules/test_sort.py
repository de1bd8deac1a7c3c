"""Sorting and the largest k, along split dims: JAX's order exactly, in few bytes."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import gshard
from gshard.moving import columnsort
from gshard.rules.base.rule import RULES
from tests.oracle import (
    DEVICE_COUNTS,
    SIZES,
    assignments,
    check,
    check_grad,
    even_split,
    kinds,
    sent,
)

SPECIAL = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, 1.0, -2.0, 3.5]


def tied(shape, dtype=np.float32, seed=0):
    """Values with many ties, and all the special ones."""
    rng = np.random.default_rng([seed, *shape])
    dtype = jnp.dtype(dtype)
    if dtype == jnp.bool_:
        return rng.random(shape) < 0.5
    if jnp.issubdtype(dtype, jnp.complexfloating):
        parts = np.empty(shape, dtype)
        parts.real, parts.imag = tied(shape, np.float32, 1), tied(shape, np.float32, 2)
        return parts
    if jnp.issubdtype(dtype, jnp.floating):
        return rng.choice(np.array(SPECIAL, np.float32), shape).astype(dtype)
    info = jnp.iinfo(dtype)
    return rng.choice(np.array([info.min, info.max, 0, 1, 2], dtype), shape)


@st.composite
def cases(draw, sizes=(*SIZES, 0)):
    rank = draw(st.integers(1, 3))
    shape = tuple(draw(st.sampled_from(sizes)) for _ in range(rank))
    devices = draw(st.sampled_from(DEVICE_COUNTS))
    split = [draw(assignments(rank, devices)) for _ in range(2)]
    return shape, draw(st.integers(0, rank - 1)), devices, split


DTYPES = (np.float32, jnp.bfloat16, np.int32, np.uint8, np.bool_, np.complex64)


@given(cases((1, 2, 7, 13, 40, 0)), st.sampled_from(DTYPES), st.integers(1, 2))
def test_any_sort(case, dtype, num_keys):
    shape, dim, devices, (first, last) = case
    x, y = tied(shape, dtype), tied(shape, np.int32, 3)

    def fn(x, y):
        index = lax.broadcasted_iota(np.int32, shape, dim)
        return lax.sort((x, y, index), dimension=dim, num_keys=num_keys), lax.sort(x, dimension=dim)

    check(fn, x, y, devices=devices, inputs=[first, first], outputs=[last] * 4, exact=True)


def only_columnsorts(monkeypatch):
    rule = RULES[lax.sort_p]

    def ways(*args):
        return [way for way in rule.ways(*args) if way.how is not None]

    monkeypatch.setitem(RULES, lax.sort_p, replace(rule, ways=ways))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("size", [96, 97, 201])
def test_columnsort(devices, size, monkeypatch):
    only_columnsorts(monkeypatch)
    x = tied((size,))

    def fn(x):
        return jnp.sort(x), jnp.argsort(x, descending=True), jnp.sort(jnp.nan_to_num(x).astype(int))

    split = even_split(1, 0, devices)
    low = check(fn, x, devices=devices, inputs=[split], outputs=[split] * 3, exact=True)
    assert not {"all_gather", "all_reduce"} & set(kinds(low))


def test_padding_comes_last_in_a_columnsort(monkeypatch):
    """Behind the largest integer, too, which garbage may be less than."""
    only_columnsorts(monkeypatch)
    x = np.random.default_rng(0).permutation(97).astype(np.int32)
    x[::7] = np.iinfo(np.int32).max
    split = even_split(1, 0, 2)
    low = check(lambda x: lax.sort(x), x, devices=2, inputs=[split], outputs=[split], exact=True)
    assert all("columnsort" in c.reason for c in low.collectives)


def test_columnsort_sends_three_times_the_tile():
    count, tile = 8 * 8192, 8192 * 4
    x = np.random.default_rng(0).integers(0, 50, count).astype(np.int32)
    split = even_split(1, 0, 8)
    low = check(lambda x: lax.sort(x), x, inputs=[split], outputs=[split], exact=True)
    assert kinds(low) == {"all_to_all": 2, "collective_permute": 2}
    assert sent(low) <= 3 * tile
    assert all("columnsort over 8 tiles" in c.reason for c in low.collectives)


def test_an_argsort_sends_less_than_a_gather_of_its_keys():
    """The index is sent as 16 bits, with the integers that are sorted."""
    split = even_split(1, 0, 8)
    low = check(jnp.argsort, tied((8 * 8192,)), inputs=[split], outputs=[split], exact=True)
    assert "all_gather" not in kinds(low)
    assert sent(low) < 7 * 8192 * 4


def test_other_dims_are_exchanged():
    x = tied((64, 512))
    split = even_split(2, 1, 8)
    low = check(lambda x: lax.sort(x), x, inputs=[split], outputs=[split], exact=True)
    assert kinds(low) == {"all_to_all": 2}
    assert sent(low) == 2 * 64 * 512 * 4 // 8 * 7 // 8


def test_rows_are_free():
    x = tied((13, 5))
    low = check(
        lambda x: (lax.sort(x), lax.top_k(x, 2)), x, inputs=[even_split(2, 0, 8)], exact=True
    )
    assert sent(low) == 0


@pytest.mark.parametrize(
    ("dtype", "special"),
    [
        (np.float32, []),
        (np.float32, [np.nan, -np.nan]),
        (np.float32, [1e-40, 0.0, -1e-40]),
        (jnp.bfloat16, [-0.0, 0.0]),
    ],
)
def test_a_cpu_sorts_floats_as_integers_in_the_same_order(dtype, special):
    x = np.random.default_rng(0).choice([*np.linspace(-3, 3, 40), np.inf, -np.inf, *special], 480)
    x = x.astype(dtype).reshape(60, 8)

    def fn(x):
        return jnp.sort(gshard.split(x, 1, 8), 0)

    run = gshard.jit(fn, hardware="cpu")
    text = run.lower(x).as_text()
    assert f"i{8 * x.itemsize}[60,1] = sort" in text
    expected = np.asarray(jax.jit(lambda x: jnp.sort(x, 0))(x))
    assert np.asarray(run(x)).tobytes() == expected.tobytes()
    assert "cond" not in gshard.jit(fn).lower(x).as_text()


def test_short_columns_are_gathered_and_say_so():
    split = even_split(1, 0, 8)
    low = check(lambda x: lax.sort(x), tied((13,)), inputs=[split], outputs=[split], exact=True)
    assert "sort: its dim must be unsplit" in low.collectives[0].reason


@given(cases(), st.sampled_from((np.float32, jnp.bfloat16, np.int32, np.uint8)), st.integers(0, 9))
def test_any_top_k(case, dtype, k):
    shape, dim, devices, (first, last) = case
    k = min(k, shape[dim])
    x = tied(shape, dtype)

    def fn(x):
        return lax.top_k(x, k, axis=dim)

    check(fn, x, devices=devices, inputs=[first], outputs=[last] * 2, exact=True)


def test_top_k_moves_candidates_only():
    x = tied((4, 1000))
    low = check(lambda x: lax.top_k(x, 3), x, inputs=[even_split(2, 1, 8)], exact=True)
    assert kinds(low) == {"all_gather": 2}
    assert sent(low) == 7 * 4 * 3 * (4 + 4)


def test_top_k_does_not_find_padding():
    x = np.random.default_rng(0).normal(size=(2, 61)).astype(np.float32)
    check(lambda x: lax.top_k(x, 2), x, inputs=[even_split(2, 1, 8)], exact=True)


def test_top_k_reaches_devices_without_a_tile():
    """Copies of the result on devices that hold no part of what is searched."""

    def best(x):
        values, rows = lax.top_k(gshard.shard(x * 2, np.arange(3)), 3)
        return values, gshard.split(rows, 0, 4)

    report = gshard.check(best, tied((400,)), devices=8)
    assert report.ok, report


def test_approximate_top_k():
    x = np.random.default_rng(0).permutation(200).astype(np.float32).reshape(2, 100)
    for fn in (lax.approx_max_k, lax.approx_min_k):
        check(lambda x, fn=fn: fn(x, 5), x, inputs=[even_split(2, 1, 8)], exact=True)
    check(
        lambda x: lax.approx_max_k(x, 5, aggregate_to_topk=False), x, inputs=[even_split(2, 1, 8)]
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_approximate_top_k_of_equal_elements(dtype):
    """Indices as without partitioning: XLA's order of equal ones is the operand's for one kind."""
    x = jnp.asarray(np.random.default_rng(0).integers(0, 4, (3, 200)), dtype)
    for fn in (lax.approx_max_k, lax.approx_min_k):
        check(lambda x, fn=fn: fn(x, 5), x, inputs=[even_split(2, 1, 8)], exact=True)
    lowered = check(lambda x: lax.approx_max_k(x, 5), x, inputs=[even_split(2, 1, 8)])
    candidates = 3 * 5 * (4 + 4) * 7
    assert sent(lowered) == (candidates if dtype == "float32" else 3 * 25 * 2 * 7)


@given(cases(SIZES), st.sampled_from(DTYPES[:5]))
def test_argmax_and_argmin(case, dtype):
    shape, dim, devices, (first, _) = case
    x = tied(shape, dtype)

    def fn(x):
        return [
            op(x, dim, index)
            for op in (lax.argmax, lax.argmin)
            for index in (np.int32, np.uint8, np.int16)
        ]

    check(fn, x, devices=devices, inputs=[first], exact=True)


def test_argmax_of_equal_extremes():
    low, high = np.full(13, -np.inf, np.float32), np.full(13, np.inf, np.float32)
    nan = np.where(np.arange(13) > 5, np.nan, 1.0).astype(np.float32)
    least = np.full(13, np.iinfo(np.int32).min, np.int32)
    for x in (low, high, nan, -nan, least):
        check(lambda x: (jnp.argmax(x), jnp.argmin(x)), x, inputs=[even_split(1, 0, 8)], exact=True)


def test_gradients():
    x = np.random.default_rng(0).permutation(26).astype(np.float32).reshape(13, 2)
    split = even_split(2, 0, 3)
    check_grad(lambda x: lax.sort(x, dimension=0), x, devices=3, inputs=[split])
    check_grad(lambda x: lax.top_k(x.T, 4)[0], x, devices=3, inputs=[split])


def test_the_program_does_not_grow_with_the_devices():
    sizes = set()
    for devices in (8, 16):
        step = gshard.jit(lambda x, d=devices: lax.sort(gshard.split(x, 0, d)), devices=devices)
        sizes.add(step.lower(jax.ShapeDtypeStruct((2**20,), np.float32)).num_equations)
    assert len(sizes) == 1


def test_the_largest_integer_is_not_behind_padding():
    x = np.arange(101, dtype=np.int32)[::-1] % 7
    x[[3, 50, 99]] = np.iinfo(np.int32).max
    check(jnp.sort, x, devices=4, inputs=[even_split(1, 0, 4)], exact=True)


def test_all_of_the_largest_k_may_be_in_one_tile():
    x = np.array([[1, 2, 9, 8, 3, 4, 5, 6]], np.float32)
    check(lambda x: lax.top_k(x, 2), x, devices=4, inputs=[even_split(2, 1, 4)], exact=True)


def test_padding_is_behind_the_largest_numbers():
    """71 of 72 rows in 4 columns; the largest integer is one that padding may have, too."""
    x = np.random.default_rng(0).integers(-9, 10, 71).astype(np.int32)
    x[::7] = np.iinfo(np.int32).max
    check(jnp.sort, x, devices=4, inputs=[even_split(1, 0, 4)], exact=True)
    check(lambda x: -jnp.sort(-x), x, devices=4, inputs=[even_split(1, 0, 4)], exact=True)


def test_columns_that_are_too_short_are_not_sorted_by_columns():
    assert columnsort.rows_needed(18, 4) == 20
    assert columnsort.rows_needed(16, 4) is None
    assert columnsort.rows_needed(97, 8) == 104
    assert columnsort.rows_needed(90, 8) is None


def test_equal_keys_keep_their_order_in_a_columnsort(monkeypatch):
    only_columnsorts(monkeypatch)
    keys = np.random.default_rng(0).integers(0, 3, 97).astype(np.int32)
    split = even_split(1, 0, 4)
    low = check(
        lambda x: lax.sort((x, jnp.arange(97)), num_keys=1),
        *(keys,), devices=4, inputs=[split], outputs=[split] * 2, exact=True,
    )  # fmt: skip
    assert all("columnsort" in c.reason for c in low.collectives)
