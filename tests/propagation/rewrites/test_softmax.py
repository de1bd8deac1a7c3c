"""However a softmax is written, keys and values pass around the ring once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from tests.oracle import annotated, assert_same, even_split, kinds, random_array, run, sent

BY_POSITION = even_split(4, 1, 8)
LITTLE = 64  # bytes of a gathered operand


def with_logsumexp(s):
    return jnp.exp(s - jax.scipy.special.logsumexp(s, -1, keepdims=True))


def of_log_softmax(s):
    return jnp.exp(jax.nn.log_softmax(s))


def without_maximum(s):
    powers = jnp.exp(s)
    return powers / powers.sum(-1, keepdims=True)


def with_a_sink(s):
    """As if there were one key more, whose logit is a number and whose value is zero."""
    top = jnp.maximum(s.max(-1, keepdims=True), 0.5)
    powers = jnp.exp(s - top)
    return powers / (powers.sum(-1, keepdims=True) + jnp.exp(0.5 - top))


def off_by_one(s):
    powers = jnp.exp(s - s.max(-1, keepdims=True))
    return powers / (1 + powers.sum(-1, keepdims=True))


def of_capped_logits(s):
    return with_logsumexp(3 * jnp.tanh(s / 3))


def with_a_temperature(s):
    """One number for each query, added to all of its logits and taken off again."""
    shift = jnp.linspace(-1, 1, s.shape[-2])[:, None]
    return jnp.exp(s + shift - jax.scipy.special.logsumexp(s + shift, -1, keepdims=True))


FORMS = [
    with_logsumexp,
    of_log_softmax,
    without_maximum,
    with_a_sink,
    off_by_one,
    of_capped_logits,
    with_a_temperature,
]


def attention(weights_of):
    def layer(q, k, v):
        logits = jnp.einsum("bqnh,bknh->bnqk", q, k) / 2
        return jnp.einsum("bnqk,bknh->bqnh", weights_of(logits), v)

    return layer


def tensors(length=19):
    return [random_array((2, length, 3, 4), seed=i) for i in range(3)]


def jitted(fn):
    return gshard.jit(annotated(fn, [BY_POSITION] * 3, [BY_POSITION]), memory_limit=LITTLE)


@pytest.mark.parametrize("form", FORMS)
def test_one_pass(form):
    got, usual = (jitted(attention(f)).lower(*tensors(16)) for f in (form, jax.nn.softmax))
    assert kinds(got) == kinds(usual) == {"collective_permute": 2 * 7}
    assert sent(got) == sent(usual)


@pytest.mark.parametrize(
    "form", [*FORMS[:1], *(pytest.param(f, marks=pytest.mark.slow) for f in FORMS[1:])]
)
def test_values_and_gradients(form):
    """Of sizes that do not divide, too."""

    def fn(q, k, v):
        def loss(*tensors):
            return jnp.sum(jnp.sin(attention(form)(*tensors)))

        return attention(form)(q, k, v), jax.grad(loss, (0, 1, 2))(q, k, v)

    args, close = tensors(), {"rtol": 1e-4, "atol": 1e-4}
    step = gshard.jit(annotated(fn, [BY_POSITION] * 3, []), memory_limit=LITTLE)
    assert_same(run(step, *args, **close), jax.jit(fn)(*args), **close)


def test_queries_that_see_nothing():
    """Their results are those of the program: not a number."""

    def fn(q, k, v):
        seen = jnp.arange(16)[:, None] > 2
        return attention(lambda s: with_logsumexp(jnp.where(seen, s, -jnp.inf)))(q, k, v)

    args = tensors(16)
    got = np.asarray(run(jitted(fn), *args))
    np.testing.assert_allclose(got, np.asarray(jax.jit(fn)(*args)), rtol=1e-5, atol=1e-5)
    assert np.isnan(got[:, :3]).all()


def test_weights_that_are_no_exponential_are_left_alone():
    def fn(q, k, v):
        return attention(lambda s: jax.nn.sigmoid(s) / jnp.exp(s).sum(-1, keepdims=True))(q, k, v)

    args = tensors()
    assert_same(run(jitted(fn), *args), jax.jit(fn)(*args), rtol=1e-4, atol=1e-4)


def test_heads_that_are_summed_with_the_keys_are_left_alone():
    """Their weights have no factor in common."""

    def fn(q, k, v):
        logits = jnp.einsum("bqnh,bknh->bnqk", q, k)
        return jnp.einsum("bnqk,bknh->bqh", with_logsumexp(logits), v)

    args, close = tensors(), {"rtol": 1e-4, "atol": 1e-4}
    step = gshard.jit(annotated(fn, [BY_POSITION] * 3, []), memory_limit=LITTLE)
    assert_same(run(step, *args, **close), jax.jit(fn)(*args), **close)
