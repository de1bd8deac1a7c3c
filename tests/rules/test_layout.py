"""Operators that rearrange dims."""

from jax import lax

from tests.oracle import check, even_split, random_array, sent


def test_reshape_that_reads_the_dims_in_another_order():
    """As in the gradient of a grouped convolution."""
    x = random_array((4, 2, 6, 3))

    def fn(x):
        return lax.reshape(x, (2, 24, 3), dimensions=(1, 0, 2, 3))

    for dim, count in [(0, 4), (1, 2), (2, 3), (3, 3)]:
        lowered = check(fn, x, devices=4 if dim == 0 else count, inputs=[even_split(4, dim, count)])
        assert sent(lowered) == 0 or dim == 2
