"""`reproducible=True`: the bits that a slow oracle prescribes, on any devices, however sharded."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import gshard
from tests.oracle import annotated, assert_same, assignments, even_split, random_array, run, sent

COUNTS = (1, 2, 3, 4, 6, 8)


# ---------------------------------------------------------------- the slow oracle, in NumPy


def tree(parts: list[np.ndarray]) -> np.ndarray:
    """Neighbours are added, then neighbours of those."""
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def folded(parts: list[np.ndarray]) -> np.ndarray:
    """The first half is added to the second; an odd one waits."""
    while len(parts) > 1:
        half = len(parts) // 2
        both = [a + b for a, b in zip(parts[:half], parts[half : 2 * half], strict=True)]
        parts = [*both, *parts[2 * half :]]
    return parts[0]


def leaves(x: np.ndarray, axis: int, rows: int = 1) -> list[np.ndarray]:
    """At most 8 leaves of at least so many rows."""
    most = max(m for m in (1, 2, 4, 8) if m == 1 or m * rows <= x.shape[axis])
    return np.split(x, np.gcd(x.shape[axis], most), axis)


def summed(x: np.ndarray, axis: int) -> np.ndarray:
    """A sum over one dim."""
    rows = [[np.take(leaf, i, axis) for i in range(leaf.shape[axis])] for leaf in leaves(x, axis)]
    return tree([folded(row) for row in rows])


def product(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x @ y: a chain of multiply-adds for each leaf. Products of floats are exact as doubles."""

    def chain(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        total = np.zeros((a.shape[0], b.shape[1]), np.float32)
        for i in range(a.shape[1]):
            exact = a[:, i : i + 1].astype(np.float64) * b[i : i + 1].astype(np.float64)
            total = (exact + total).astype(np.float32)
        return total

    dtype = x.dtype
    parts = zip(leaves(x, 1, 24), leaves(y, 0, 24), strict=True)
    return tree([chain(a, b).astype(dtype) for a, b in parts])


def bits(fn, *args, devices: int, inputs=(), outputs=()) -> jax.Array:
    step = gshard.jit(
        annotated(fn, inputs, outputs), devices=jax.devices()[:devices], reproducible=True
    )
    return run(step, *args, exact=True)


# ---------------------------------------------------------------- sums and products


@settings(max_examples=6, deadline=None)
@given(st.data())
def test_a_sum_has_the_order_of_its_tree(data):
    sizes = st.sampled_from((1, 3, 8, 12, 24, 40))
    shape = tuple(data.draw(st.lists(sizes, min_size=2, max_size=3)))
    axis = data.draw(st.integers(0, len(shape) - 1))
    devices = data.draw(st.sampled_from(COUNTS[1:]))
    x = random_array(shape)
    where = [data.draw(assignments(len(shape), devices))]
    after = [data.draw(assignments(len(shape) - 1, devices))]
    got = bits(lambda x: jnp.sum(x, axis), x, devices=devices, inputs=where, outputs=after)
    np.testing.assert_array_equal(np.asarray(got), summed(x, axis))


@settings(max_examples=6, deadline=None)
@given(st.data())
def test_a_product_is_a_tree_of_chains(data):
    m, k, n = (data.draw(st.sampled_from(s)) for s in ((1, 3, 8, 24), (1, 6, 48, 192), (1, 5, 16)))
    dtype = data.draw(st.sampled_from((jnp.float32, jnp.bfloat16)))
    devices = data.draw(st.sampled_from(COUNTS[1:]))
    x, y = random_array((m, k), dtype), random_array((k, n), dtype, seed=1)
    where = [data.draw(assignments(2, devices)) for _ in range(2)]
    after = [data.draw(assignments(2, devices))]
    got = bits(jnp.matmul, x, y, devices=devices, inputs=where, outputs=after)
    assert_same(got, jnp.asarray(product(x, y)), exact=True)


def test_subtrees_are_exchanged_in_as_many_bytes_as_an_all_reduce():
    """The leaves of a smaller result are gathered: one collective is quicker than two."""
    x, y = random_array((64, 192)), random_array((192, 48))
    where = [even_split(2, 1, 8), even_split(2, 0, 8)]

    def lowered(outputs=()):
        fn = annotated(jnp.matmul, where, outputs)
        return gshard.jit(fn, devices=8, reproducible=True).lower(x, y)

    size = 64 * 48 * 4
    assert [c.kind for c in lowered().collectives] == ["all_to_all", "all_gather"]
    assert sent(lowered()) == 2 * size * 7 // 8
    split = lowered([even_split(2, 0, 8)])
    assert [c.kind for c in split.collectives] == ["all_to_all"]
    assert sent(split) == size * 7 // 8


def test_a_weight_is_gathered_once_for_products_that_cut_it_otherwise():
    """Its leaves are rows in one product, columns in the other: each reshapes one copy."""
    x, w = random_array((384, 192)), random_array((192, 192), seed=1)

    def fn(x, w):
        return (x @ w) @ w.T

    where = [even_split(2, 0, 8), even_split(2, 0, 8)]
    lowered = gshard.jit(annotated(fn, where), devices=8, reproducible=True).lower(x, w)
    assert [c.kind for c in lowered.collectives] == ["all_gather"]
    assert sent(lowered) == w.nbytes * 7 // 8
    assert_same(bits(fn, x, w, devices=8, inputs=where), bits(fn, x, w, devices=1), exact=True)


# ---------------------------------------------------------------- what else has an order


def on_all(fn, *args, dims: int = 1) -> None:
    """Assert equal bits on all counts of devices, the first operand split along its dims."""
    alone = gshard.jit(fn, devices=jax.devices()[:1], reproducible=True)(*args)
    for devices in (3, 8):
        for dim in range(dims):
            where = [even_split(np.ndim(args[0]), dim, devices)]
            assert_same(bits(fn, *args, devices=devices, inputs=where), alone, exact=True)


def test_a_multiplication_is_not_fused_with_an_addition():
    x, y, z = (random_array((40,), seed=i) for i in range(3))
    got = gshard.jit(lambda x, y, z: x * y + z, reproducible=True)(x, y, z)
    np.testing.assert_array_equal(np.asarray(got), x * y + z)


def test_a_logarithm_is_one_wherever_its_element_is():
    edges = [0.0, -1.0, np.inf, np.nan, 1.0, 0.99999994, 3e38, 1.1754944e-38]
    x = np.concatenate([np.abs(random_array((104 - len(edges),))), np.float32(edges)])
    got = gshard.jit(jnp.log, devices=jax.devices()[:1], reproducible=True)(x)
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(np.asarray(got), np.log(x.astype(np.float64)), rtol=2e-7)
    on_all(jnp.log, x)


def test_a_division_by_a_broadcast_value_stays_a_division():
    """XLA multiplies by its reciprocal, unless a tile has a single column."""
    x, y = random_array((24, 8)), random_array((24, 1), seed=1)
    for devices, dim in ((1, 0), (3, 0), (8, 1)):
        got = bits(jnp.divide, x, y, devices=devices, inputs=[even_split(2, dim, devices), None])
        np.testing.assert_array_equal(np.asarray(got), x / y)


def test_a_function_of_a_large_reduction_has_the_bits_of_a_small_one():
    """Libraries that reduce compute `exp` by themselves if there is enough to reduce."""
    x = random_array((8, 72, 24))
    on_all(lambda x: jnp.exp(x - x.max(-1, keepdims=True)), x)


@pytest.mark.parametrize("name", ["tan", "atan", "cbrt", "erf"])
def test_functions_have_the_same_bits_in_small_loops(name):
    fn, numbers = getattr(lax, name), np.linspace(-4, 4, 97, dtype=np.float32)
    edges = np.float32([0.0, -0.0, np.inf, -np.inf, np.nan, 3e38, 1.1754944e-38])
    x = np.concatenate([numbers, edges])

    def both(x):
        narrow = x.astype(jnp.bfloat16)
        rounded = fn(narrow.astype(jnp.float32)).astype(jnp.bfloat16)
        return fn(x), lax.map(lambda row: fn(row.reshape(1))[0], x), fn(narrow), rounded

    on_one = gshard.jit(both, devices=jax.devices()[:1], reproducible=True)
    alone, by_row, narrow, rounded = on_one(x)
    assert_same(alone, by_row, exact=True)
    assert_same(narrow, rounded, exact=True)
    with np.errstate(all="ignore"):
        wanted = getattr(scipy.special, name, None) or getattr(np, name.replace("at", "arct"))
        wanted = wanted(x.astype(np.float64))
    np.testing.assert_allclose(np.asarray(alone), wanted, rtol=4e-7, atol=1e-37)


@pytest.mark.slow
def test_attention_with_one_head_on_each_device_has_the_bits_of_all_heads_on_one():
    x = [random_array((2, 8, 8, 6), seed=i) for i in range(4)]

    def attention(q, k, v):
        logits = jnp.einsum("bsnh,btnh->bnst", q, k) / q.shape[-1] ** 0.5
        return jnp.einsum("bnst,btnh->bsnh", jax.nn.softmax(logits), v)

    def fn(q, k, v, slope):
        result, back = jax.vjp(attention, q, k, v)
        return result, back(slope)

    alone = gshard.jit(fn, devices=jax.devices()[:1], reproducible=True)(*x)
    heads = [even_split(4, 2, 8)] * 4
    assert_same(bits(fn, *x, devices=8, inputs=heads), alone, exact=True)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (jnp.cumsum(x, 0), jnp.prod(x, 0)),
        lambda x: lax.cumlogsumexp(x[:6], reverse=True),
        lambda x: jnp.zeros((5, 3)).at[jnp.arange(24) % 5].add(x * x),
        lambda x: jax.nn.softmax(x, 0) * jnp.var(x),
        lambda x: lax.scan(lambda c, row: (c * 0.5 + row @ row, c), jnp.float32(0), x)[1],
        lambda x: lax.reduce_window(x, 0.0, lax.add, (3, 1), (1, 1), "SAME"),
        lambda x: jnp.fft.irfft2(jnp.fft.rfft2(x) * (1 + 2j)),
        lambda x: jnp.matmul(x + 1j * x, x.T).real,
        lambda x: lax.linalg.triangular_solve(jnp.eye(3) * 3 + 1, x, lower=True),
        lambda x: lax.ragged_dot(x, x.reshape(8, 3, 3), jnp.int32([5, 0, 9, 1, 2, 3, 2, 2])),
        pytest.param(lambda x: lax.igamma(jnp.abs(x) + 1, jnp.abs(x)), marks=pytest.mark.slow),
    ],
    ids=[
        "cumsum and prod",
        "cumlogsumexp",
        "scatter",
        "softmax",
        "scan",
        "window",
        "fourier",
        "complex product",
        "triangular solve",
        "ragged product",
        "a function that is a loop",
    ],
)
def test_operators_that_add_have_one_order(fn):
    on_all(fn, random_array((24, 3)))


def test_random_numbers_depend_on_the_place_alone():
    def draw(x):
        keep = jax.random.bernoulli(jax.random.key(3), 0.7, x.shape)
        return jnp.where(keep, x, 0), jax.random.normal(jax.random.key(4), x.shape) + x

    on_all(draw, random_array((24, 4)))


def test_a_training_step_has_the_same_bits_on_any_devices():
    x, w = random_array((24, 8)), random_array((8, 16), seed=1)

    def loss(w, x):
        h = jax.nn.gelu(x @ w)
        return jnp.mean(jax.nn.logsumexp((h - h.mean(-1, keepdims=True)) @ w.T, -1))

    def step(x, w):
        value, slope = jax.value_and_grad(loss)(w, x)
        return value, w - 0.1 * slope

    alone = gshard.jit(step, devices=jax.devices()[:1], reproducible=True)(x, w)
    assert_same(alone, jax.jit(step)(x, w), rtol=1e-6, atol=1e-6)  # the same program, to rounding
    for devices in (2, 3, 8):
        where = [even_split(2, 0, devices), even_split(2, 1, devices) if devices % 3 else None]
        got = gshard.jit(
            annotated(step, where), devices=jax.devices()[:devices], reproducible=True
        )(x, w)
        assert_same(got, alone, exact=True)


# ---------------------------------------------------------------- convolutions


def convolve(x, k, **how):
    return lax.conv_general_dilated(
        x, k, how.pop("window_strides", (1, 1)), how.pop("padding", "SAME"),
        dimension_numbers=("NHWC", "HWIO", "NHWC"), **how,
    )  # fmt: skip


CONVOLUTIONS = [
    {},
    {"window_strides": (2, 1), "padding": ((1, 2), (0, 3))},
    {"lhs_dilation": (2, 1), "rhs_dilation": (1, 2), "padding": ((1, 1), (2, 2))},
    {"feature_group_count": 2},
    {"batch_group_count": 2},
]


@pytest.mark.parametrize(
    "how",
    [
        # One quick one; the others take as long each.
        pytest.param(how, id=" ".join(how) or "plain", marks=[pytest.mark.slow] * (number != 1))
        for number, how in enumerate(CONVOLUTIONS)
    ],
)
def test_a_convolution_is_itself_and_has_one_order(how):
    """The result and both gradients, near XLA's, and the same bits on any devices."""
    groups = how.get("feature_group_count", 1)
    x, k = random_array((2, 12, 8, 4)), random_array((3, 3, 4 // groups, 6), seed=1)
    weights = random_array(jax.eval_shape(lambda: convolve(x, k, **how)).shape, seed=2)

    def fn(x, k):
        result, back = jax.vjp(lambda x, k: convolve(x, k, **how), x, k)
        return result, back(weights)

    alone = gshard.jit(fn, devices=jax.devices()[:1], reproducible=True)(x, k)
    assert_same(alone, jax.jit(fn)(x, k), rtol=1e-4, atol=1e-4)
    for devices, dim in ((3, 1), (8, 2)):
        where = [even_split(4, dim, devices)]
        assert_same(bits(fn, x, k, devices=devices, inputs=where), alone, exact=True)


def test_many_updates_are_scattered_in_leaves_and_summed_in_fewer_bytes():
    """Each device scatters its own updates; gathering them would send 24 times as much."""
    places = np.arange(192, dtype=np.int32) % 4

    def fn(x):
        return jnp.zeros((4, 256)).at[places].add(x)

    x = random_array((192, 256))
    on_all(fn, x)
    step = gshard.jit(annotated(fn, [even_split(2, 0, 8)]), devices=8, reproducible=True)
    assert sent(step.lower(x)) <= 2 * 4 * 256 * 4


@pytest.mark.parametrize("devices", [3, 6])
def test_a_split_that_is_no_power_of_2_exchanges_nodes_of_the_tree(devices):
    x, y = random_array((24, 192)), random_array((192, 24), seed=1)
    where = [even_split(2, 1, devices), even_split(2, 0, devices)]
    got = bits(jnp.matmul, x, y, devices=devices, inputs=where)
    assert_same(got, jnp.asarray(product(x, y)), exact=True)
    fn = annotated(jnp.matmul, where)
    lowered = gshard.jit(fn, devices=jax.devices()[:devices], reproducible=True).lower(x, y)
    result, operands = 24 * 24 * 4, 2 * 24 * 192 * 4
    nodes = 2 if devices == 3 else 1
    assert sent(lowered) <= (nodes + 1) * result + operands // 3
    assert "all_gather" not in [c.kind for c in lowered.collectives][:-1]


# ---------------------------------------------------------------- refusals


def test_manual_regions_are_refused_with_their_line():
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")

    @jax.shard_map(mesh=mesh, in_specs=spec, out_specs=jax.sharding.PartitionSpec())
    def total(x):
        return lax.psum(x, "i")

    with pytest.raises(ValueError, match=r"test_order.py:\d+: what a manual region"):
        gshard.jit(total, reproducible=True)(np.ones(8, np.float32))
    with pytest.raises(ValueError, match="partitioner is 'xla'"):
        gshard.jit(total, reproducible=True, partitioner="xla")


def test_a_narrow_value_is_gathered_and_widened_afterwards():
    """As in the usual program: a pin is recomputed where its value is needed."""

    def fn(narrow, scale, x):
        return x @ (narrow.astype(jnp.float32) * scale)

    narrow = np.random.default_rng(0).integers(-8, 8, (48, 16)).astype(np.int8)
    arguments = narrow, random_array((16,)), random_array((64, 48))
    inputs = [even_split(2, 0, 8), None, even_split(2, 0, 8)]
    step = gshard.jit(annotated(fn, inputs, ()), devices=jax.devices()[:8], reproducible=True)
    assert sent(step.lower(*arguments)) == 48 * 16 * 7 / 8
    alone = gshard.jit(fn, devices=jax.devices()[:1], reproducible=True)(*arguments)
    assert_same(run(step, *arguments, exact=True), alone, exact=True)


def test_a_pinned_value_that_another_sharding_needs():
    """Five rows of 13 on each of 5 devices, and an operator that wants them elsewhere."""

    def fn(x):
        pooled = lax.reduce_window(x, 0.0, lax.add, (1, 3), (1, 1), "VALID") / 3
        return (pooled - pooled.mean(1, keepdims=True)) * lax.rsqrt(pooled.var(1, keepdims=True))

    x = random_array((18, 15))
    alone = gshard.jit(fn, devices=jax.devices()[:1], reproducible=True)(x)
    assert_same(bits(fn, x, devices=5, inputs=[even_split(2, 1, 5)]), alone, exact=True)


def test_a_primitive_without_an_order_of_its_own_runs_in_one_piece():
    def fn(x):
        y = jax.grad(
            lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (3, 1), (1, 1), "SAME").sum()
        )
        return y(x) + lax.reduce(x, np.float32(1), lambda a, b: a * b + a, (0,))

    on_all(fn, random_array((24, 3)))
