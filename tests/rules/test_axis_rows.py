"""Rows that are a stride apart in one tensor and a step apart in another."""

import jax.numpy as jnp
import pytest

from tests.oracle import check, even_split, random_array

ROWS = even_split(2, 0, 8)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("step", "stride"), [(3, 2), (2, 3), (1, 2), (2, 1), (4, 2)])
@pytest.mark.parametrize("size", [48, 64])
def test_rows_with_a_stride_become_rows_with_a_step(step, stride, size, reverse):
    x, how = random_array((size, 4)), [ROWS]

    def spread(x):
        rows = (x[::-1] if reverse else x)[::stride]
        return jnp.zeros((len(rows) * step + 3, 4)).at[1 : 1 + len(rows) * step : step].set(rows)

    check(spread, x, exact=True, inputs=how, outputs=how)
