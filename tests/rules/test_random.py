"""Random numbers: the unpartitioned numbers bit for bit, each device making its own part."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxprs_in_params

import gshard
from gshard._jax import iota_2x32_shape_p
from gshard.rules import random as rules
from tests.oracle import DEVICE_COUNTS, SIZES, annotated, assignments, check, even_split, sent

# Not philox: XLA fails to compile its multiplication inside of any shard_map.
IMPLS = ("threefry2x32", "threefry4x32", "rbg", "unsafe_rbg")
# Not threefry4x32: XLA's CPU backend never ends on keys made from keys, unpartitioned as well.
CHAINED = ("threefry2x32", "rbg", "unsafe_rbg")


def shapes(max_rank: int = 3):
    return st.lists(st.sampled_from((*SIZES, 0)), min_size=0, max_size=max_rank).map(tuple)


@st.composite
def draws(draw, max_rank: int = 3):
    """A shape, a number of devices and an assignment for what is drawn."""
    shape = draw(shapes(max_rank))
    devices = draw(st.sampled_from(DEVICE_COUNTS))
    return shape, devices, draw(assignments(len(shape), devices))


def local_sizes(lowered) -> int:
    """The most elements that any value of the per-device program has."""

    def largest(jaxpr):
        for eqn in jaxpr.eqns:
            yield from (math.prod(v.aval.shape) for v in eqn.outvars if v.aval.dtype != np.int32)
            for inner in jaxprs_in_params(eqn.params):
                yield from largest(getattr(inner, "jaxpr", inner))

    return max(largest(lowered.jaxpr), default=0)


@given(draws(), st.sampled_from(IMPLS), st.sampled_from((8, 16, 32)), st.booleans())
def test_bits_of_every_generator(case, impl, width, raw):
    shape, devices, out = case
    key = jax.random.key(7, impl=impl)

    def fn(key):
        if raw:
            key = jax.random.wrap_key_data(key, impl=impl)
        return jax.random.bits(key, shape, dtype=f"uint{width}")

    low = check(
        fn, jax.random.key_data(key) if raw else key, devices=devices, outputs=[out], exact=True
    )
    assert sent(low) == 0


@pytest.mark.slow
@settings(max_examples=5)
@given(draws())
def test_64_bits(case):
    shape, devices, out = case
    with jax.enable_x64(True):
        low = check(
            lambda k: (
                jax.random.bits(k, shape, dtype="uint64"),
                jax.random.normal(k, shape, jnp.float64),
            ),
            jax.random.key(3),
            devices=devices,
            outputs=[out, out],
            exact=True,
        )
    assert sent(low) == 0


@pytest.mark.slow
@settings(max_examples=5)
@given(draws())
def test_threefry_without_counters(case):
    shape, devices, out = case
    with jax.threefry_partitionable(False):
        low = check(
            lambda k: (jax.random.bits(k, shape), jax.random.split(k, shape)),
            jax.random.key(3),
            devices=devices,
            outputs=[out, out],
            exact=True,
        )
    assert sent(low) == 0


@pytest.mark.slow
@settings(max_examples=6)
@given(draws(2), shapes(2), st.sampled_from(CHAINED), st.data())
def test_split_and_fold_in_and_many_keys(case, batch, impl, data):
    shape, devices, _ = case
    first = data.draw(assignments(len(batch), devices))
    last = data.draw(assignments(len(batch) + len(shape), devices))
    seeds = np.arange(math.prod(batch), dtype=np.uint32).reshape(batch)

    def fn(seeds):
        def draw(s):
            key = jax.random.fold_in(jax.random.key(s, impl=impl), s + 1)
            return jax.random.bits(key, shape), jax.random.key_data(jax.random.split(key, 3))

        for _ in batch:
            draw = jax.vmap(draw)
        return draw(seeds)

    check(fn, seeds, devices=devices, inputs=[first], outputs=[last], exact=True)


DISTRIBUTIONS = {
    "uniform": lambda k: jax.random.uniform(k, (13, 6)),
    "normal_bf16": lambda k: jax.random.normal(k, (13, 6), jnp.bfloat16),
    "dropout": lambda k: jax.random.bernoulli(k, 0.3, (13, 6)),
    "randint": lambda k: jax.random.randint(k, (13, 6), -5, 70),
    "truncated": lambda k: jax.random.truncated_normal(k, -1.0, 2.0, (13, 6)),
    "gumbel": lambda k: jax.random.gumbel(k, (13, 6)),
    "categorical": lambda k: jax.random.categorical(k, jnp.zeros((13, 6, 5))),
    "gamma": lambda k: jax.random.gamma(k, jnp.linspace(0.1, 4, 6), (13, 6)),
    "loggamma": lambda k: jax.random.loggamma(k, 0.5, (13, 6)),
    "beta": lambda k: jax.random.beta(k, 2.0, 0.5, (13, 6)),
    "exponential": lambda k: jax.random.exponential(k, (13, 6)),
    "laplace": lambda k: jax.random.laplace(k, (13, 6)),
    "poisson": lambda k: jax.random.poisson(k, 3.0, (13, 6)),
}


SLOW = ("beta", "loggamma")  # they compile for long; gamma stays


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in DISTRIBUTIONS]
)
def test_distributions(name):
    fn = DISTRIBUTIONS[name]
    out = np.arange(6).reshape(3, 2)
    low = check(fn, jax.random.key(1), devices=6, outputs=[out], exact=name not in ("beta",))
    if name != "poisson":  # its rejection loop has to agree on when to stop
        assert sent(low) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "impl",
    ["threefry2x32", *(pytest.param(n, marks=pytest.mark.slow) for n in ("rbg", "unsafe_rbg"))],
)
def test_gamma_with_many_keys(impl):
    keys = jax.random.split(jax.random.key(1, impl=impl), 5)
    alpha = np.linspace(0.1, 3, 35, dtype=np.float32).reshape(5, 7)
    fn = jax.vmap(lambda k, a: jax.random.gamma(k, a))
    for out in (even_split(2, 0, 3), even_split(2, 1, 3)):
        check(fn, keys, alpha, devices=3, outputs=[out], exact=True)


@pytest.mark.slow
def test_gradient_of_gamma():
    def fn(a):
        return jnp.sum(jax.random.gamma(jax.random.key(1), a) ** 2)

    check(jax.grad(fn), np.linspace(0.1, 3, 13, dtype=np.float32), inputs=[even_split(1, 0, 8)])


@pytest.mark.parametrize("impl", ["threefry2x32", "threefry4x32", "philox2x32", "philox4x32"])
def test_a_device_makes_only_its_own_part(impl):
    def fn(key):
        return jax.random.bits(key, (64, 32)), jax.random.key_data(jax.random.split(key, (64, 32)))

    out = np.arange(8).reshape(4, 2)
    step = gshard.jit(annotated(fn, outputs=[out, out[..., None]]))
    low = step.lower(jax.random.key(0, impl=impl))
    assert sent(low) == 0
    words = jax.random.key_data(jax.random.key(0, impl=impl)).size
    assert local_sizes(low) <= 64 * 32 // 8 * words


def test_generators_that_cannot_be_split_say_so():
    step = gshard.jit(annotated(lambda k: jax.random.bits(k, (64,)), outputs=[even_split(1, 0, 8)]))
    low = step.lower(jax.random.key(0, impl="rbg"))
    assert "draws all elements at once" in str(low.jaxpr.pretty_print(name_stack=True))


def test_counters_beyond_32_bits():
    """Where a draw has more than 2**32 elements, the high halves of the counters matter."""
    shape = (3, 70001, 70003)
    strides = [70001 * 70003, 70003, 1]
    index = np.indices((3, 2, 5)).astype(object)
    rows = (
        jnp.asarray(np.indices((3, 2, 5)), jnp.uint32)
        + jnp.asarray([0, 69990, 69000], jnp.uint32)[:, None, None, None]
    )
    wanted = sum((index[d] + [0, 69990, 69000][d]) * strides[d] for d in range(3))
    total = (jnp.zeros((3, 2, 5), jnp.uint32),) * 2
    for d in range(3):
        total = rules._add(total, rules._times(rows[d], strides[d], shape[d]))
    got = np.asarray(total[0]).astype(object) * 2**32 + np.asarray(total[1]).astype(object)
    assert (got == wanted).all()


@pytest.mark.slow
@settings(max_examples=5)
@given(st.sampled_from(DEVICE_COUNTS), st.booleans())
def test_permutations(devices, independent):
    def fn(k):
        return jax.random.permutation(k, jnp.arange(26).reshape(13, 2), independent=independent)

    check(fn, jax.random.key(5), devices=devices, outputs=[even_split(2, 0, devices)], exact=True)


def test_bit_generator_and_stateful_uniform():
    key = jnp.arange(4, dtype=jnp.uint32)
    low = check(
        lambda k: jax.lax.rng_bit_generator(k, (13, 3)),
        key,
        outputs=[None, even_split(2, 0, 8)],
        exact=True,
    )
    assert sent(low) == 0
    step = gshard.jit(lambda: gshard.split(jax.lax.rng_uniform(2.0, 3.0, (13, 4)), 0, 4))
    drawn = np.asarray(step())
    assert drawn.shape == (13, 4)
    assert ((drawn >= 2) & (drawn < 3)).all()


def test_threefry_on_raw_words():
    words = [np.arange(n, dtype=np.uint32) for n in (1, 1, 13, 13)]

    def fn(*words):
        return jax.extend.random.threefry2x32_p.bind(*words)

    low = check(
        fn,
        *words,
        inputs=[None, None, even_split(1, 0, 8)],
        outputs=[even_split(1, 0, 8)] * 2,
        exact=True,
    )
    assert sent(low) == 0


@pytest.mark.parametrize("output", [even_split(2, 0, 8), even_split(2, 1, 3), None])
def test_counters_by_themselves(output):
    """Where a kernel takes its counters from JAX's primitive, every device counts its own part."""

    def fn():
        high, low = iota_2x32_shape_p.bind(shape=(13, 7))
        return high, low

    lowered = check(fn, outputs=[output, output], exact=True)
    assert not lowered.collectives
