"""What is computed by element is computed in the tiles of those who read it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from tests.oracle import annotated, check, even_split, kinds, random_array, sent


def limited(u, mode="edge"):
    q = jnp.pad(u, ((2, 2), (0, 0)), mode=mode)
    d = q[1:] - q[:-1]
    slope = jnp.where(d[1:] * d[:-1] > 0, jnp.minimum(jnp.abs(d[1:]), jnp.abs(d[:-1])), 0)
    flux = q[1:-2] + 0.5 * slope[:-1]
    return u - 0.1 * (flux[1:] - flux[:-1])


ROWS = {"inputs": [even_split(2, 0, 8)], "outputs": [even_split(2, 0, 8)]}


@pytest.mark.parametrize("mode", ["edge", "reflect", "wrap"])
def test_a_limiter_sends_the_rows_at_borders(mode):
    """Two from before a tile and one from behind it, whatever is beyond the ends."""
    fn = functools.partial(limited, mode=mode)
    low = check(fn, random_array((64, 3)), **ROWS, rtol=1e-5, atol=1e-5)
    assert set(kinds(low)) == {"collective_permute"}
    assert sent(low) == 3 * 12, low.collectives


def test_where_tiles_have_padding():
    """61 rows are in tiles of 8."""
    low = check(limited, random_array((61, 3)), **ROWS, rtol=1e-5, atol=1e-5)
    assert sent(low) <= 4 * 12, low.collectives


def test_a_gradient_with_windows_of_zeros():
    """Windows of numbers alone are compared, too: JAX's `Literal` has no hash."""

    def gradient(u):
        return jax.grad(lambda u: jnp.sum(limited(u, "constant") ** 2))(u)

    low = check(gradient, random_array((64, 3)), **ROWS, rtol=1e-4, atol=1e-4)
    assert sent(low) <= 7 * 12, low.collectives


def test_what_is_read_otherwise_stays(tmp_path):
    """The sum of all rows needs the tensor itself."""

    def fn(u):
        d = jnp.tanh(jnp.pad(u, ((2, 2), (0, 0))))
        return d[1:-3], d.sum()

    struct = jax.ShapeDtypeStruct((64, 3), jnp.float32)
    low = gshard.jit(annotated(fn, [even_split(2, 0, 8)]), devices=8).lower(struct)
    (text,) = (p.read_text() for p in low.dump(tmp_path) if "row_spaces" in p.name)
    assert "# not applied: no rows would stay in their tiles" in text


def fluxes(u):
    f = jnp.tanh(u[1:] - u[:-1])
    return u.at[1:-1].add(0.1 * ((f * f + f)[1:] - (f * f + f)[:-1]))


def coefficients(u):
    """A number for each row, which is the same for all columns."""
    x = jnp.linspace(0, 1, u.shape[0])[1:-1, None]
    return u.at[1:-1].add(x * (u[2:] + u[:-2] - 2 * u[1:-1]))


def staggered(u):
    """Fluxes between rows, a row less than there are, are carried as well."""

    def step(_, state):
        u, f = state
        f = f + 0.5 * (u[1:] - u[:-1])
        return u.at[1:-1].add(0.5 * (f[1:] - f[:-1])), f

    return jax.lax.fori_loop(0, 3, step, (u, jnp.zeros((u.shape[0] - 1, u.shape[1]))))[0]


def two_fields(u):
    q = jnp.stack([u * u + 1, u])
    v = q[1] / q[0]
    f = jnp.stack([q[1], q[1] * v + q[0]])
    between = 0.5 * (f[:, 1:] + f[:, :-1]) - 0.1 * (q[:, 1:] - q[:, :-1])
    return q.at[:, 1:-1].add(-0.1 * (between[:, 1:] - between[:, :-1])).sum(0)


# Rows that a device sends at most, forwards.
OTHERS = {
    "fluxes": (fluxes, 2),
    "coefficients": (coefficients, 2),
    "staggered": (staggered, 3 * 2),
    "two fields": (two_fields, 6),
    "fourth differences": (lambda u: u.at[2:-2].add(jnp.diff(u, n=4, axis=0)), 4),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_spellings(name):
    fn, rows = OTHERS[name]
    low = check(fn, random_array((64, 3)), **ROWS, rtol=1e-4, atol=1e-4)
    assert sent(low) <= rows * 12, low.collectives
    check(fn, random_array((61, 3)), **ROWS, rtol=1e-4, atol=1e-4)


def test_between_rows_of_another_tensor():
    """Rows that are spread are not next to each other in a place, either."""

    def fn(x):
        x = x.at[:4].add(2 * jnp.sin(x[:4]))
        x = x.at[7:].add(2 * jnp.sin(x[7:]))
        y = jax.lax.pad(x, 0.5, [(2, 1, 1)])
        return y.at[1:-1].add(y[:-2] - 2 * y[2:])

    check(fn, random_array((8,)), devices=2, outputs=[even_split(1, 0, 2)])


def quotients(u):
    """A reconstruction whose weights are quotients, with three rows around the field."""
    q = jnp.concatenate([u[:1]] * 3 + [u] + [u[-1:]] * 3)
    left, right = q[1:-1] - q[:-2], q[2:] - q[1:-1]
    a, b = 1 / (0.1 + left**2), 1 / (0.1 + right**2)
    face = q[1:-1] + 0.5 * (a * left + b * right) / (a + b)
    return u - 0.1 * (face[2:-2] - face[1:-3])


GRADIENTS = {
    "reflect": functools.partial(limited, mode="reflect"),
    "constant": functools.partial(limited, mode="constant"),
    "edge": functools.partial(limited, mode="edge"),
    "quotients": quotients,
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_the_gradient_of_a_limiter(name):
    """Rows at the borders of the field are computed by themselves, in the tile that has them."""

    def gradient(u):
        return jax.grad(lambda u: jnp.sum(GRADIENTS[name](u) ** 2))(u)

    low = check(gradient, random_array((64, 3)), **ROWS, rtol=1e-4, atol=1e-4)
    assert sent(low) <= 7 * 12, low.collectives
    check(gradient, random_array((61, 3)), **ROWS, rtol=1e-4, atol=1e-4)


def test_the_gradient_of_two_limiters_at_edges():
    """A row that is repeated at the border is that row as often, in a tensor as wide as that."""

    def gradient(u):
        return jax.grad(lambda u: jnp.sum(limited(limited(u)) ** 2))(u)

    low = check(gradient, random_array((64, 3)), **ROWS, rtol=1e-4, atol=1e-4)
    assert "all_gather" not in kinds(low)


def test_row_maps_of_row_maps_that_stay():
    """Windows of spread rows, in places and as they are; a row that loses its dim, in zeros."""

    def fn(x):
        y = jax.lax.pad(x[:, 7:12:2], 0.5, [(2, 1, 0), (2, 1, 1)])
        y = y.at[1:-1, 1:-1].add(y[:-2, 1:-1] - 2 * y[2:, 1:-1])
        return jax.lax.pad(y, 0.5, [(0, 1, 1), (0, 1, 0)])

    for rows in (1, 2, 8):
        tiles = np.arange(8).reshape(rows, 8 // rows)
        check(fn, random_array((16, 13)), inputs=[tiles[:1, :2]], outputs=[tiles])

    def changed(x):
        x = jnp.gradient(x.at[:, 6].set(2 * jnp.take(x, 0, 1)), axis=1)
        return jnp.sum(jnp.sin(jnp.diff(x, axis=1, prepend=0.0)))

    tiles = np.arange(3).reshape(1, 3)
    check(jax.grad(changed), random_array((3, 16)), devices=4, inputs=[tiles], rtol=1e-4)
