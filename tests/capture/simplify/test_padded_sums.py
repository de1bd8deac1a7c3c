"""Windows of sums of padded tensors are sums of windows; program in, program out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from gshard.capture.simplify.row_maps import compose_row_maps
from tests.capture.simplify.texts import after, dedent

X = np.zeros((8, 2), np.float32)


def composed(fn, *arguments):
    return after(compose_row_maps, fn, *arguments)


def pulled_back(fn):
    """The gradient of a linear function, of the result's."""
    return lambda y: jax.linear_transpose(fn, X)(y)[0]


def difference(u):
    q = jnp.pad(u, ((1, 1), (0, 0)), mode="wrap")
    return q[2:] - q[:-2]


def test_the_gradient_of_a_wrapped_difference_is_one():
    """Sums of padded tensors, of which the first and the last row are added to others."""
    assert composed(pulled_back(difference), X) == dedent("""
        program (a:f32[8,2])
          b:f32[8,2] = row_map[layers=(0[1:8, 0:2] at [0:7, 0:2], 0[0:1, 0:2] at [7:8, 0:2])] a
          c:f32[8,2] = neg b
          d:f32[8,2] = row_map[layers=(0[7:8, 0:2] at [0:1, 0:2], 0[0:7, 0:2] at [1:8, 0:2])] a
          e:f32[8,2] = add c d
          return e
    """)


def test_windows_of_zeros_alone_are_zeros():
    def fn(x):
        low, high = (jax.lax.pad(x, 0.0, ((n, 5 - n, 0), (0, 0, 0))) for n in (2, 3))
        return (low + high)[:2]

    assert composed(fn, X) == dedent("""
        program (a:f32[8,2])
          b:f32[2,2] = broadcast_in_dim[shape=(2, 2)] 0.0
          return b
    """)


def test_a_padded_product_is_a_product_of_what_is_padded():
    """Several of them, with other numbers, then read the same rows."""
    assert composed(lambda x: jax.lax.pad(x * -2, 0.0, ((1, 0, 0), (0, 0, 0))), X) == dedent("""
        program (a:f32[8,2])
          b:f32[9,2] = row_map[layers=(0[] at [0:1, 0:2], 1[0:8, 0:2] at [1:9, 0:2])] -0.0 a
          c:f32[9,2] = mul b -2.0
          return c
    """)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (jnp.pad(x, ((1, 0), (0, 0))) + jnp.pad(x, ((0, 1), (0, 0)))) ** 2,
        lambda x: (jnp.pad(x, ((1, 0), (0, 0)), constant_values=1.0) + jnp.ones((9, 2)))[1:],
        lambda x: (x[1:] + x[:-1])[2:],
    ],
)
def test_other_sums_stay(fn):
    """All of one is read; numbers that are no zeros; tensors that are not padded."""
    assert composed(fn, X).count("= add") == 1


@pytest.mark.parametrize("mode", ["edge", "wrap", "reflect", "symmetric"])
def test_values(mode):
    def loss(u):
        q = jnp.pad(u, 2, mode=mode)
        return jnp.sum((q[4:, 2:-2] * 3 - q[:-4, 2:-2] + 0.5 * q[2:-2, 1:-3]) ** 2)

    u = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)
    program = compose_row_maps(jax.make_jaxpr(jax.grad(loss))(u))
    (found,) = jax.jit(jaxpr_as_fun(program))(u)
    np.testing.assert_allclose(found, jax.grad(loss)(u), rtol=1e-5, atol=1e-5)


def test_few_rows_are_scaled_before_they_are_padded():
    text = composed(lambda x: jax.lax.pad(x[:1] * 2, 0.0, ((3, 4, 0), (0, 0, 0))), X)
    assert "f32[1,2] = mul" in text
    assert "f32[8,2] = mul" not in text


def test_long_sums_of_padded_tensors():
    """As many terms as recursion would not reach."""

    def fn(x):
        total = jax.lax.pad(x, 0.0, ((1, 1, 0), (0, 0, 0)))
        for k in range(1200):
            total += jax.lax.pad(x, 0.0, ((k % 3, 2 - k % 3, 0), (0, 0, 0)))
        return total[1:-1]

    assert composed(fn, X).count("= add") == 1200
