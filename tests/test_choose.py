"""The choice of a split for every factor."""

import jax.numpy as jnp

from tests.oracle import check, even_split, random_array


def test_a_split_that_a_dim_cannot_express_is_not_taken_as_agreed():
    """The 5 of (3 4 5) is split in the result; the flat operand, which is whole, cannot be."""
    x = random_array((60,))
    check(
        lambda x: jnp.reshape(x, (3, 4, 5)), x, devices=4, outputs=[even_split(3, 2, 4)], exact=True
    )
