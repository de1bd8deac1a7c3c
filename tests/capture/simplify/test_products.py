"""A transposed product is one product; program in, program out."""

import jax.numpy as jnp
import numpy as np

from gshard.capture.simplify.products import transpose_products
from tests.capture.simplify.texts import after, dedent

A, B = np.zeros((4, 3), np.float32), np.zeros((4, 5), np.float32)


def test_a_transposed_product():
    assert after(transpose_products, lambda a, b: (a.T @ b).T, A, B).count("transpose[") == 1
    text = after(transpose_products, lambda a, b: jnp.einsum("bi,bj->ij", a, b).T, A, B)
    assert text == dedent("""
        program (a:f32[4,3], b:f32[4,5])
          c:f32[5,3] = dot_general[dimension_numbers=(((0,), (0,)), ((), ())) preferred_element_type=float32] b a
          return c
    """)  # noqa: E501


def test_a_product_that_is_used_otherwise_too_stays():
    def fn(a, b):
        product = jnp.einsum("bi,bj->ij", a, b)
        return product.T, product

    assert "transpose" in after(transpose_products, fn, A, B)
