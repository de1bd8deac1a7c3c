"""Slices, pads, reversals, concatenations and updates in any composition; stencils of any spelling.

Values are those of the unpartitioned run, gradients too; a stencil sends the rows at the borders of
tiles.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle import DEVICE_COUNTS, assignments, check, even_split, kinds, random_array, sent

ROWS = even_split(2, 0, 8)


def along(x, dim, rows):
    """An index of all of `x` but `rows` of a dim."""
    return (slice(None),) * dim + (rows,)


def some(n, number):
    """Rows of a dim of `n`, maybe every other, at least one."""
    first = number % n
    return slice(first, first + max(1, (n - first) * (1 + number % 2) // 2), 1 + number % 3)


def inside(n):
    return slice(1, -1) if n > 2 else slice(None)


def put(x, dim, number, how):
    rows = along(x, dim, some(x.shape[dim], number))
    return getattr(x.at[rows], how)(jnp.sin(x[rows]) * 2)


def around(x, dim, mode):
    pads = [(int(d == dim), 2 * int(d == dim)) for d in range(x.ndim)]
    return jnp.pad(x, pads, mode=mode) if x.shape[dim] > 2 else x


def apart(x, dim, step, stride):
    """Every so many rows of a dim, so many rows apart."""
    rows = x[along(x, dim, slice(None, None, stride))]
    n = rows.shape[dim] * step + 1
    wide = jnp.ones([n if d == dim else m for d, m in enumerate(x.shape)])
    return wide.at[along(x, dim, slice(0, n - 1, step))].set(rows) if x.size < 500 else x


def stencil(x, dim):
    if x.shape[dim] < 3:
        return x
    middle = [inside(n) if n > 2 else slice(None) for n in x.shape]
    left, right = list(middle), list(middle)
    left[dim], right[dim] = slice(0, -2), slice(2, None)
    return x.at[tuple(middle)].add(x[tuple(left)] - 2 * x[tuple(right)])


STEPS = {
    "slice": lambda x, d, i: x[along(x, d, some(x.shape[d], i))],
    "reversed": lambda x, d, i: jnp.flip(x, d),
    "roll": lambda x, d, i: jnp.roll(x, i - 3, d),
    "add": lambda x, d, i: put(x, d, i, "add"),
    "set": lambda x, d, i: put(x, d, i, "set"),
    "multiply": lambda x, d, i: put(x, d, i, "multiply"),
    "minimum": lambda x, d, i: put(x, d, i, "min"),
    "one row": lambda x, d, i: x.at[along(x, d, i % x.shape[d])].set(jnp.take(x, 0, d) * 2),
    "two rows": lambda x, d, i: x.at[along(x, d, 0)].add(1.0).at[along(x, d, -1)].add(2.0),
    "backwards": lambda x, d, i: x.at[along(x, d, slice(None, None, -1))].add(x * 2),
    "pad": lambda x, d, i: around(x, d, ("constant", "edge", "reflect", "wrap")[i % 4]),
    "spread": lambda x, d, i: jax.lax.pad(x, 0.5, [(i % 3, 1, int(k == d)) for k in range(x.ndim)]),
    "joined": lambda x, d, i: jnp.concatenate([x, jnp.cos(x)[along(x, d, slice(0, 2))], x], d),
    "stencil": lambda x, d, i: stencil(x, d),
    "difference": lambda x, d, i: jnp.diff(x, axis=d, prepend=0.0),
    "gradient": lambda x, d, i: jnp.gradient(x, axis=d) if x.shape[d] > 1 else x,
    "twice": lambda x, d, i: jnp.repeat(x, 2, d) if x.size < 500 else x,
    "sum": lambda x, d, i: jnp.flip(x, d) + jnp.roll(x, 1, d),
    "tile": lambda x, d, i: (
        jnp.tile(x, [1 + i % 3 * (k == d) for k in range(x.ndim)]) if x.size < 500 else x
    ),
    "apart": lambda x, d, i: apart(x, d, 1 + i % 3, 1 + i // 3),
    "sine": lambda x, d, i: jnp.sin(x),
}


@st.composite
def chains(draw):
    rank, devices = draw(st.integers(1, 3)), draw(st.sampled_from(DEVICE_COUNTS))
    shape = tuple(draw(st.sampled_from((3, 5, 8, 13))) for _ in range(rank))
    step = st.tuples(
        st.sampled_from(sorted(STEPS)), st.integers(0, rank - 1), st.integers(0, 9), st.booleans()
    )
    steps = draw(st.lists(step, min_size=1, max_size=4))

    def fn(x):
        for name, dim, number, looped in steps:

            def once(x, name=name, dim=dim, number=number):
                return STEPS[name](x, dim, number)

            if looped and jax.eval_shape(once, x).shape == x.shape:
                x = jax.lax.fori_loop(0, 2, lambda _, x, once=once: once(x), x)
            else:
                x = once(x)
        return x

    split = st.one_of(assignments(rank, devices), assignments(rank, devices))
    return fn, random_array(shape), devices, draw(split), draw(split)


@pytest.mark.slow
@settings(max_examples=25)
@given(chains(), st.booleans())
def test_any_chain(case, with_gradient):
    fn, x, devices, before, after = case
    how = {"devices": devices, "inputs": [before], "rtol": 1e-4, "atol": 1e-4}
    if with_gradient:
        check(jax.grad(lambda x: jnp.sum(jnp.sin(fn(x)))), x, outputs=[before], **how)
    else:
        check(fn, x, outputs=[after], **how)


def laplacian(u):
    return u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2] - 4 * u[1:-1, 1:-1]


def five_points(q):
    return q[2:, 1:-1] + q[:-2, 1:-1] + q[1:-1, 2:] + q[1:-1, :-2] - 4 * q[1:-1, 1:-1]


def nine_points(q):
    rows, columns = q.shape
    shifts = [(a, b) for a in range(3) for b in range(3)]
    return sum((a - 2.5 * b) * q[a : rows - 2 + a, b : columns - 2 + b] for a, b in shifts)


def with_borders(u):
    return jnp.concatenate([u[:1], u[1:-1] + 0.1 * (u[2:] + u[:-2] - 2 * u[1:-1]), u[-1:]])


def insulated(u):
    v = u.at[1:-1, 1:-1].add(0.1 * laplacian(u))
    return v.at[0].set(v[1]).at[-1].set(v[-2]).at[:, 0].set(v[:, 1])


def red_and_black(u):
    u = u.at[::2].add(0.1 * (jnp.roll(u, 1, 0)[::2] + jnp.roll(u, -1, 0)[::2]))
    return u.at[1::2].add(0.1 * (jnp.roll(u, 1, 0)[1::2] + jnp.roll(u, -1, 0)[1::2]))


# The rows that a device sends, at most: those that its neighbours need of it.
STENCILS = {
    "add": (lambda u: u.at[1:-1, 1:-1].add(0.1 * laplacian(u)), 2),
    "set": (lambda u: u.at[1:-1, 1:-1].set(u[1:-1, 1:-1] + laplacian(u)), 2),
    "multiply": (lambda u: u.at[1:-1, 1:-1].multiply(laplacian(u)), 2),
    "rows": (lambda u: u.at[1:-1].add(u[2:] + u[:-2] - 2 * u[1:-1]), 2),
    "upwind": (lambda u: u.at[1:].set(u[1:] - 0.1 * (u[1:] - u[:-1])), 1),
    "four rows": (lambda u: u.at[2:-2].add(u[4:] + u[3:-1] + u[:-4] + u[1:-3]), 4),
    "padded": (lambda u: u + five_points(jnp.pad(u, 1)), 2),
    "edge": (lambda u: u + five_points(jnp.pad(u, 1, mode="edge")), 2),
    "wrap": (lambda u: u + five_points(jnp.pad(u, 1, mode="wrap")), 2),
    "reflect": (lambda u: u + five_points(jnp.pad(u, 1, mode="reflect")), 2),
    "symmetric": (lambda u: u + five_points(jnp.pad(u, 1, mode="symmetric")), 2),
    "nine points": (lambda u: u.at[1:-1, 1:-1].add(nine_points(u)), 2),
    "nine points, padded": (lambda u: u + nine_points(jnp.pad(u, 1, mode="edge")), 2),
    "difference": (lambda u: u + jnp.diff(u, axis=0, prepend=0.0), 1),
    "two differences": (lambda u: u.at[1:-1].add(jnp.diff(u, n=2, axis=0)), 2),
    "gradient": (lambda u: jnp.gradient(u, axis=0), 2),
    "borders": (with_borders, 2),
    "padded inside": (lambda u: u + jnp.pad(laplacian(u), 1), 2),
    "insulated": (insulated, 2),
    "red and black": (red_and_black, 4),
}


@pytest.mark.parametrize("name", STENCILS)
def test_a_stencil_sends_the_rows_at_the_borders_of_tiles(name):
    fn, rows = STENCILS[name]
    u = random_array((64, 12))
    low = check(fn, u, inputs=[ROWS], outputs=[ROWS])
    assert 0 < sent(low) <= rows * 12 * 4
    check(fn, random_array((13, 5)), inputs=[ROWS], outputs=[ROWS])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if number % 4 else [])
        for number, name in enumerate(sorted(STENCILS))
    ],
)
def test_its_gradient_sends_as_much_again(name):
    fn, rows = STENCILS[name]

    def gradient(u):
        return jax.grad(lambda u: jnp.sum(fn(u) ** 2))(u)

    low = check(gradient, random_array((64, 12)), inputs=[ROWS], outputs=[ROWS], rtol=1e-4)
    assert 0 < sent(low) <= 2 * rows * 12 * 4
    check(gradient, random_array((13, 5)), inputs=[ROWS], outputs=[ROWS], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["add", "padded", "edge", "insulated"])
def test_on_two_axes(name):
    """A border row of half of the columns each way, and as many columns."""
    tiles = np.arange(8).reshape(4, 2)
    low = check(STENCILS[name][0], random_array((64, 32)), inputs=[tiles], outputs=[tiles])
    assert sent(low) <= (2 * 16 + 2 * 16) * 4 * 1.1


def test_in_a_loop():
    fn, rows = STENCILS["add"]

    def steps(u):
        return jax.lax.fori_loop(0, 5, lambda _, u: fn(u), u)

    low = check(steps, random_array((64, 12)), inputs=[ROWS], outputs=[ROWS])
    assert sent(low) <= 5 * rows * 12 * 4


def test_few_copies_are_painted_and_many_are_made_of_a_gathered_tensor():
    x, how = random_array((8, 3)), [ROWS]
    few, many = (lambda x, n=n: jnp.tile(x, (n, 1)) for n in (3, 100))
    for fn in (few, lambda x: jnp.concatenate([x] * 3)):
        lowered = check(fn, x, exact=True, inputs=how, outputs=how)
        assert sent(lowered) == 3 * 3 * 4  # a row of each copy
    lowered = check(many, x, exact=True, inputs=how, outputs=how)
    assert sent(lowered) == 7 * 3 * 4


@pytest.mark.parametrize("rows", [64, 61])
def test_rolls_by_several_rows_fetch_what_all_of_them_read(rows):
    """A derivative of fourth order on a ring: two rows each way, and not one and two."""

    def fn(u):
        return sum(w * jnp.roll(u, k, 0) for k, w in ((-2, -1.0), (-1, 16.0), (1, 16.0), (2, -1.0)))

    how = {"inputs": [ROWS], "outputs": [ROWS], "rtol": 1e-4, "atol": 1e-4}
    low = check(fn, random_array((rows, 12)), **how)
    assert sent(low) <= (4 if rows == 64 else 7) * 12 * 4
    far = [
        check(lambda u, k=k: jnp.roll(u, k, 0), random_array((rows, 12)), **how) for k in (30, -27)
    ]
    both = check(
        lambda u: jnp.roll(u, 30, 0) + jnp.roll(u, -27, 0), random_array((rows, 12)), **how
    )
    assert sent(both) <= sum(map(sent, far))  # of many tiles: one by one


def test_a_shift_by_padding_sends_the_rows_that_cross():
    def fn(x):
        return jnp.pad(x, ((2, 0), (0, 0)))[:-2]

    x, how = random_array((64, 3)), {"inputs": [ROWS], "exact": True}
    assert sent(check(fn, x, outputs=[ROWS], **how)) == 2 * 3 * 4


@pytest.mark.parametrize("order", [(0, 4, 1, 5, 2, 6, 3, 7), (0, 2, 4, 6, 7, 5, 3, 1)], ids=str)
def test_rows_in_another_order_are_fetched_at_once(order):
    """Two rows of each device, of which it has one or none: those of an interleaved pipeline."""
    how = [even_split(2, 0, 4)]
    low = check(
        lambda x: jnp.concatenate([x[i : i + 1] for i in order]),
        random_array((8, 3)), exact=True, inputs=how, outputs=how, devices=4,
    )  # fmt: skip
    assert sent(low) <= 2 * 3 * 4


def derivative(u):
    """Of fourth order, on a ring."""
    return sum(w * jnp.roll(u, k, 0) for k, w in ((-2, -1.0), (-1, 8.0), (1, -8.0), (2, 1.0)))


def test_rows_are_sent_once_whatever_is_computed_of_them():
    """The gradient rolls -g, 8 g and -8 g: rows of g, which are then multiplied."""

    def fn(u):
        return jax.grad(lambda u: jnp.sum((u * derivative(u)) ** 2))(u), jnp.roll(u * u, 1, 0)

    u = np.random.default_rng(0).integers(-3, 4, (64, 12)).astype(np.float32)
    low = check(fn, u, exact=True, inputs=[ROWS], outputs=[ROWS, ROWS])  # sums of small integers
    assert sent(low) == 2 * 4 * 12 * 4


def test_a_slice_at_run_time_has_rows_of_its_own():
    """It fetches none together with slices at known places."""

    def fn(x, i):
        return jax.lax.dynamic_slice_in_dim(x, i, 32) + x[:32] + x[2:34] + x[4:36]

    check(fn, random_array((64, 4)), np.int32(21), inputs=[ROWS, None], outputs=[ROWS])


def test_rolls_along_two_split_dims():
    """The single row that goes round is not among the rows that all readers fetch at once."""
    tiles = np.arange(8).reshape(4, 2)

    def fn(b):
        return jnp.roll(b, (1, 1), (0, 1)) + 2 * jnp.roll(b, (1, -1), (0, 1)) + jnp.roll(b, -1, 1)

    check(fn, random_array((24, 16)), inputs=[tiles], outputs=[tiles])


def neighbours(u):
    """All that are one row or column or both away, on a torus."""
    return sum(jnp.roll(u, (i, j), (0, 1)) for i in (-1, 0, 1) for j in (-1, 0, 1))


def padded(u, mode):
    """The same, of a field that goes on as at its edges, or as zeros."""
    q, (n, m) = jnp.pad(u, 1, mode=mode), u.shape
    return sum((i + 2 * j + 1) * q[i : i + n, j : j + m] for i in range(3) for j in range(3))


def inner(u):
    """The same, of the inner cells alone."""
    return u.at[1:-1, 1:-1].set(sum(u[i : 22 + i, j : 30 + j] for i in range(3) for j in range(3)))


@pytest.mark.parametrize("fn", [
    lambda u: padded(u, "edge"),
    neighbours,
    lambda u: padded(u, "constant"),
    inner,
], ids=["edge", "torus", "zeros", "inside"])  # fmt: skip
def test_corners_come_with_the_rows(fn):
    """One row and one column are sent each way, columns with the corners, and no more for each."""

    def both(u):
        return fn(u), jax.grad(lambda u: jnp.sum(jnp.sin(fn(u))))(u)

    tiles, u = np.arange(8).reshape(4, 2), random_array((24, 32))
    once = 4 * (2 * 16 + 2 * (24 // 4 + 2))
    for fn_of_u, times in ((fn, 1), (both, 2)):
        outputs = [tiles] * times
        low = check(fn_of_u, u, inputs=[tiles], outputs=outputs, rtol=1e-4, atol=1e-4)
        assert set(kinds(low)) == {"collective_permute"}
        assert sent(low) <= times * once


def test_three_split_dims_have_edges_and_corners():
    """All 26 neighbours of a cell: two layers each way, which grow along the dims before."""
    turns = [(i, j, k) for i in (-1, 0, 1) for j in (-1, 0, 1) for k in (-1, 0, 1)]

    def fn(u):
        return sum(jnp.roll(u, turn, (0, 1, 2)) for turn in turns)

    tiles = np.arange(8).reshape(2, 2, 2)
    low = check(fn, random_array((8, 8, 8)), inputs=[tiles], outputs=[tiles], rtol=1e-4, atol=1e-4)
    assert sent(low) == 4 * 2 * (4 * 4 + 4 * 6 + 6 * 6)
