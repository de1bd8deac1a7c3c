"""Attention in a ring: program in, program out, and in the dump where it applied or why not."""

import jax
import jax.numpy as jnp
import pytest

import gshard
from tests.capture.simplify.texts import dedent
from tests.propagation.rewrites.rewritten import rewritten

ROWS = jnp.ones((16, 4))


def attention(weights_of):
    def fn(q, k, v):
        q, k, v = (gshard.split(t, 0, 8) for t in (q, k, v))
        return gshard.split(weights_of(q @ k.T) @ v, 0, 8)

    return fn


def ring_attention(weights_of, memory_limit=64, gradient=False):
    fn = attention(weights_of)
    if gradient:
        fn = jax.grad(lambda *qkv: (attention(weights_of)(*qkv) ** 2).sum(), argnums=(0, 1, 2))
    return rewritten("ring_attention", fn, ROWS, ROWS, ROWS, memory_limit=memory_limit)


def causal(s):
    return jax.nn.softmax(jnp.where(jnp.tri(16, dtype=bool), s, -1e9))


def test_a_softmax_is_one_pass_whose_body_has_the_scores():
    """What comes out is divided by the sum of the weights."""
    assert "\n".join(ring_attention(jax.nn.softmax)) == dedent("""
        # applied at test_ring_attention.py: an online softmax; passes around the ring: 1
        >   i:f32[16], t:f32[16,4], o:f32[16] = ring_pass[ring=over 8 devices, softmax] d g f  # split dim 0 by 8; split dim 0 by 8; split dim 0 by 8
        >     body (u:f32[16,4], v:f32[4,16], w:f32[16,4])
        >       h:f32[16,16] = dot_general[dimension_numbers=(((1,), (0,)), ((), ())) preferred_element_type=float32] u v
        >       return h
        >   x:f32[16,1] = broadcast_in_dim[shape=(16, 1) broadcast_dimensions=(0,)] o  # split dim 0 by 8
        >   y:f32[16] = squeeze[dimensions=(1,)] x  # split dim 0 by 8
        >   z:f32[16,4] = broadcast_in_dim[shape=(16, 4) broadcast_dimensions=(0,)] y  # split dim 0 by 8
        >   r:f32[16,4] = div t z  # split dim 0 by 8
    """)  # noqa: E501


def test_a_mask_is_computed_in_the_body_and_skips_blocks():
    lines = ring_attention(causal)
    assert "ring_pass[ring=over 8 devices, softmax, mask]" in lines[1]
    assert sum("iota" in line for line in lines[2:]) == 2


def test_a_gradient_needs_no_pass_for_the_sum_of_its_errors():
    """Without `do . o` in its place there were four."""
    (remark, *lines) = ring_attention(jax.nn.softmax, gradient=True)
    assert remark.endswith("an online softmax; passes around the ring: 2")
    assert sum("ring_pass[" in line for line in lines) == 2


def test_a_gradient_whose_softmax_is_given():
    """Its maximum and its sum are arguments: there is nothing to divide after the ring."""

    def fn(q, k, v, back, top, total):
        q, k, v, back = (gshard.split(t, 0, 8) for t in (q, k, v, back))
        weights = jnp.exp(q @ k.T - top) / total
        errors = weights * (back @ v.T)
        errors -= weights * errors.sum(-1, keepdims=True)
        return gshard.split(errors @ k, 0, 8)

    rows = (*(ROWS,) * 4, *(jnp.ones((16, 1)),) * 2)
    (remark, *_) = rewritten("ring_attention", fn, *rows)
    assert remark.endswith("no softmax; passes around the ring: 2")


@pytest.mark.parametrize(
    ("weights_of", "limit", "remark"),
    [
        (jax.nn.softmax, 2**20, "no keys, and no scores of a device's queries, exceed the memory"),
        (lambda s: jnp.sort(s), 64, "sort at test_ring_attention.py is not computed score by"),
        (lambda s: s.reshape(4, 64).reshape(16, 16), 64, "reshape at test_ring_attention.py mixes"),
    ],
)
def test_where_it_does_not_apply_the_dump_says_why(weights_of, limit, remark):
    (line,) = ring_attention(weights_of, limit)
    assert line.startswith("# not applied")
    assert remark in line


def test_an_ordinary_product_with_a_large_result():
    """The keys of one column have 64 bytes, and a device's scores 128."""
    column = jnp.ones((16, 1))
    columns = (column, column, column)
    (line,) = rewritten("ring_attention", attention(jax.nn.relu), *columns, memory_limit=64)
    assert line.endswith("too large, and their sums over keys are not those of a softmax")
    lines = rewritten("ring_attention", attention(jax.nn.softmax), *columns, memory_limit=64)
    assert lines[0].startswith("# applied")


def test_scores_that_are_a_result():
    def fn(q, k):
        q, k = (gshard.split(t, 0, 8) for t in (q, k))
        return gshard.split(jnp.exp(q @ k.T), 0, 8)

    (line,) = rewritten("ring_attention", fn, ROWS, ROWS)
    assert line.startswith("# not applied at test_ring_attention.py: ")
