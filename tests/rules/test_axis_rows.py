"""Rows that are a stride apart in one tensor and a step apart in another."""

import jax
import jax.numpy as jnp
import pytest

from tests.oracle import check, even_split, kinds, random_array, sent

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


ROW = 4 * 6  # bytes


def both_colours(u):
    """Gauss-Seidel: odd rows of the interior, then even ones."""

    def step(_, u):
        for k in (1, 2):
            n = len(u)
            above, below = u[k - 1 : n - 2 : 2, 1:-1], u[k + 1 : n : 2, 1:-1]
            beside = u[k : n - 1 : 2, :-2] + u[k : n - 1 : 2, 2:]
            u = u.at[k : n - 1 : 2, 1:-1].set(0.25 * (above + below + beside))
        return u

    return jax.lax.fori_loop(0, 3, step, u)


def residual(u):
    return (2 * u).at[1:-1].add(-u[:-2] - u[2:])


def restricted(r):
    return r[::2].at[1:-1].set(0.25 * (r[1:-2:2] + 2 * r[2:-1:2] + r[3::2]))


def prolonged(e):
    u = jnp.zeros((2 * len(e) - 1, e.shape[1])).at[::2].set(e)
    return u.at[1::2].set(0.5 * (e[:-1] + e[1:]))


def haar(x):
    """Each slice twice, as it is written."""
    return (x[::2] + x[1::2]) / 2, (x[::2] - x[1::2]) / 2


# The rows that a device sends, of tiles of 33 rows that have tiles of 17 for every other one.
STRIDED = {
    "one border row for a colour": (both_colours, 256, 3 * 2),
    "two border rows for a colour": (both_colours, 258, 3 * 4),
    "every other row": (lambda r: r[::2], 257, 3),
    "restriction": (restricted, 257, 7),
    "restriction of a residual": (lambda u: restricted(residual(u)), 257, 9),
    "prolongation": (prolonged, 129, 4),
    "wavelets": (haar, 514, 7),
}


@pytest.mark.parametrize("name", STRIDED)
def test_rows_with_gaps_are_fetched_at_once(name):
    """Whatever a tile reads of another is a run of rows, without those that only others need."""
    fn, size, rows = STRIDED[name]
    low = check(fn, random_array((size, 6)), inputs=[ROWS], rtol=1e-5, atol=1e-5)
    assert set(kinds(low)) == {"collective_permute"}
    assert sent(low) <= rows * ROW, low.collectives
