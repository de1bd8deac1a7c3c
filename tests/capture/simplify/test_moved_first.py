"""What is computed by element is computed after row maps, where others move rows; in and out."""

import jax
import jax.numpy as jnp
import numpy as np

from gshard.capture.simplify.row_maps import compose_row_maps
from tests.capture.simplify.texts import after, dedent

X = np.zeros((8, 2), np.float32)


def composed(fn, *arguments):
    return after(compose_row_maps, fn, *arguments)


def padded(x, low, high):
    return jax.lax.pad(x, 0.0, ((low, high, 0), (0, 0, 0)))


def test_zeros_are_those_that_the_product_makes():
    """Both pads read rows of one tensor; zeros times a negative number are negative."""
    assert composed(lambda x: (padded(x * -2, 1, 0), padded(x, 0, 1)), X) == dedent("""
        program (a:f32[8,2])
          b:f32[9,2] = pad[padding_config=((1, 0, 0), (0, 0, 0))] a -0.0
          c:f32[9,2] = mul b -2.0
          d:f32[9,2] = pad[padding_config=((0, 1, 0), (0, 0, 0))] a 0.0
          return c, d
    """)


def test_a_product_that_row_maps_alone_read():
    def fn(x):
        y = -x
        return jnp.roll(y, 1, 0), jnp.roll(y, -1, 0), jnp.roll(x, 2, 0)

    text = composed(fn, X)
    assert text.count("row_map") == 3
    assert text.count("= neg") == 2


def test_what_is_read_otherwise_stays():
    """A product that is needed itself; pads with ones; few rows; row maps of one tensor alone."""

    def fn(x):
        y = x * 3
        return padded(y, 1, 0), y, padded(x, 1, 0)

    assert composed(fn, X).count("f32[8,2] = mul") == 1
    ones = composed(lambda x: (jax.lax.pad(x * 2, 1.0, ((1, 0, 0), (0, 0, 0))), padded(x, 1, 0)), X)
    assert "f32[8,2] = mul" in ones
    few = composed(lambda x: (padded(x[:1] * 2, 3, 4), padded(x[:1], 4, 3)), X)
    assert "f32[1,2] = mul" in few
    both = composed(lambda x: (lambda y: (padded(y, 1, 0), padded(y, 0, 1)))(x * 2), X)
    assert both.count("= mul") == 1
