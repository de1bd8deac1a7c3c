"""Numbers of 4 and 8 bits move, pad and combine like others, bit for bit."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.oracle import check, even_split, random_array

DTYPES = ["int4", "uint4", "float8_e4m3fn", "float8_e5m2", "int8"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_numbers(dtype):
    x = np.abs(random_array((13, 4), np.int32)) % 7

    def fn(x):
        small = x.astype(dtype)
        return [
            jnp.concatenate([small[3:], small[:3]]),
            small.reshape(26, 2)[::-1].T,
            jnp.where(x > 2, small, small[:1]),
            small.max(0),
            jnp.sort(small, axis=0),
            small[jnp.array([5, 0, 12])],
        ]

    split = even_split(2, 0, 8)
    check(
        fn, x, inputs=[split], outputs=[None, even_split(2, 1, 8), even_split(2, 0, 3)], exact=True
    )
    check(fn, x, inputs=[even_split(2, 0, 5)], exact=True)
