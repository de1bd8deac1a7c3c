"""Numbers of 4 and 8 bits move, pad and combine like others, bit for bit."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.oracle import check, even_split, random_array

DTYPES = ["int4", "uint4", "float8_e4m3fn", "float8_e5m2", "int8"]


@pytest.mark.slow
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


EIGHT_BITS = [name for name in dir(ml_dtypes) if name.startswith("float8") and "e8m0" not in name]


def every_number(dtype) -> np.ndarray:
    """All numbers of a type of 8 bits but NaN, in 8 rows, the extremes of the type alone too."""
    numbers = np.arange(256, dtype=np.uint8).view(jnp.dtype(dtype))
    numbers = numbers[~np.isnan(numbers.astype(np.float32))]
    return np.resize(numbers, (8, 32)).astype(jnp.dtype(dtype))


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_extremes_of_every_type(dtype):
    """Of all its numbers, the largest among them, and where there is a NaN."""
    x = every_number(dtype)
    x[3, 5] = x[6, 9] = np.nan
    split = even_split(2, 0, 8)
    check(lambda x: [x.max(0), x.min(0), x.argmax(0), x.argmin(0)], x, inputs=[split], exact=True)
