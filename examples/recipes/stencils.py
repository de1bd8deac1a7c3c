"""Stencils as they are written for one device: a field's rows are split, two border rows are sent.

Updates of the interior, slices of a padded field, `jnp.gradient`, red and black rows, an initial
field that is found by gradient descent: whatever the spelling, a device sends the rows at the
borders of its tile to its neighbours, in both directions, and nothing else.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import gshard
from examples.recipes.recipe import D, Recipe, all_reduce, show
from examples.recipes.transformer import SMALL, Size

STEPS = 4


def laplacian(u):
    return u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2] - 4 * u[1:-1, 1:-1]


def updated(u):
    """Heat, with fixed borders."""
    return lax.fori_loop(0, STEPS, lambda _, u: u.at[1:-1, 1:-1].add(0.1 * laplacian(u)), u)


def padded(u):
    """A wave equation, with mirrors at the borders."""

    def step(_, state):
        u, before = state
        return 2 * u - before + 0.1 * laplacian(jnp.pad(u, 1, mode="edge")), u

    return lax.fori_loop(0, STEPS, step, (u, u))[0]


def by_gradient(u):
    """Advection along the rows."""
    return lax.fori_loop(0, STEPS, lambda _, u: u - 0.1 * u * jnp.gradient(u, axis=0), u)


def limited(u, mode="constant"):
    """A flux of second order with limited slopes, of a field with zeros around it."""

    def step(_, u):
        q = jnp.pad(u, ((2, 2), (0, 0)), mode=mode)
        d = q[1:] - q[:-1]
        slope = jnp.where(d[1:] * d[:-1] > 0, 2 * d[1:] * d[:-1] / (d[1:] + d[:-1] + 1e-6), 0)
        flux = q[1:-2] + 0.5 * slope[:-1]
        return u - 0.1 * (flux[1:] - flux[:-1])

    return lax.fori_loop(0, STEPS, step, u)


def red_and_black(u):
    """Every other row, then the others."""

    def step(_, u):
        u = u.at[::2].add(0.1 * (jnp.roll(u, 1, 0)[::2] + jnp.roll(u, -1, 0)[::2]))
        return u.at[1::2].add(0.1 * (jnp.roll(u, 1, 0)[1::2] + jnp.roll(u, -1, 0)[1::2]))

    return lax.fori_loop(0, STEPS, step, u)


def staggered(points, between):
    """Electromagnetic waves: magnetic fields are between the points, and so a row less."""

    def step(_, state):
        points, between = state
        between = between + 0.5 * (points[1:] - points[:-1])
        return points.at[1:-1].add(0.5 * (between[1:] - between[:-1])), between

    split = (gshard.split(x, 0, D) for x in (points, between))
    return lax.fori_loop(0, STEPS, step, tuple(split))


def limited_at_edges(u):
    """The same, of a field that goes on as at its edges."""
    return limited(u, "edge")


def on_a_ring(u):
    """The gradient of advection by differences of fourth order on a ring."""

    def loss(u):
        for _ in range(STEPS):
            weights = {-2: -1.0, -1: 8.0, 1: -8.0, 2: 1.0}
            u = u - 0.1 * u * sum(w * jnp.roll(u, k, 0) for k, w in weights.items())
        return jnp.sum(u**2)

    return jax.grad(loss)(u)


def inverse(u, wanted):
    """A step of gradient descent towards a field that becomes the wanted one."""

    def loss(u):
        for _ in range(STEPS):
            u = u.at[1:-1, 1:-1].add(0.1 * laplacian(u))
        return jnp.mean((u - gshard.split(wanted, 0, D)) ** 2)

    value, grad = jax.value_and_grad(loss)(u)
    return u - grad, value


def all_around(u):
    """Life, as the mean of all eight neighbours on a torus; rows and columns are split."""

    def step(_, u):
        turns = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1) if i or j]
        return u + 0.1 * sum(jnp.roll(u, turn, (0, 1)) for turn in turns)

    return lax.fori_loop(0, STEPS, step, gshard.shard(u, np.arange(D).reshape(2, D // 2)))


DIRECTIONS = ((0, 0), (1, 0), (0, 1), (-1, 0), (0, -1), (1, 1), (-1, 1), (-1, -1), (1, -1))


def collided_and_moved(f):
    """A lattice Boltzmann step: the populations of nine directions, in one tensor."""
    ways = np.array(DIRECTIONS, np.float32)
    weights = np.array([4 / 9, *[1 / 9] * 4, *[1 / 36] * 4], np.float32)[:, None, None]

    def step(_, f):
        density = jnp.sum(f, 0)
        along = jnp.tensordot(ways, jnp.tensordot(ways, f, (0, 0)) / density, 1)
        wanted = weights * density * (1 + 3 * along + 4.5 * along**2)
        f = f + 0.6 * (wanted - f)
        return jnp.stack([jnp.roll(f[q], DIRECTIONS[q], (0, 1)) for q in range(9)])

    return lax.fori_loop(0, STEPS, step, gshard.split(f, 1, D))


def by_rows(fn):
    """The function of a field whose rows are split."""
    return lambda u, *others: fn(gshard.split(u, 0, D), *others)


def recipes(size: Size = SMALL) -> list[Recipe]:
    n = 256 if size.M < 1024 else 8192
    field, points = (jax.ShapeDtypeStruct((rows, n), jnp.float32) for rows in (n, n + 1))
    borders = STEPS * 2 * n * 4  # a row to each neighbour
    return [
        Recipe("heat, updates of the interior", by_rows(updated), (field,), borders),
        Recipe("waves, a padded field", by_rows(padded), (field,), borders),
        Recipe("advection, jnp.gradient", by_rows(by_gradient), (field,), borders),
        # Two rows from before a tile, one from behind it.
        Recipe("limited slopes, a padded field", by_rows(limited), (field,), borders * 3 // 2),
        Recipe("limited slopes, edges", by_rows(limited_at_edges), (field,), borders * 3 // 2),
        # And the fields between the points, to the tiles of the points and back: seven rows each.
        Recipe("waves on a staggered grid", staggered, (points, field),
               borders + 2 * (D - 1) * n * 4),
        # Two rows each way, of the fields and of their gradients.
        Recipe("fourth order on a ring", by_rows(on_a_ring), (field,), 4 * borders),
        Recipe("red and black rows", by_rows(red_and_black), (field,), 2 * borders),
        # The rows of the fields, and of their gradients; the error is summed.
        Recipe("initial heat", by_rows(inverse), (field, field), 2 * borders + all_reduce(4)),
        # A row each way of the three populations that go there.
        Recipe("lattice Boltzmann, nine fields", collided_and_moved,
               (jax.ShapeDtypeStruct((9, n, n), jnp.float32),), 3 * borders),
        # A row of the tile each way, and a column with the corners.
        Recipe("eight neighbours, 2 x 4", all_around, (field,),
               STEPS * 2 * 4 * (n // (D // 2) + n // 2 + 2)),
    ]  # fmt: skip


if __name__ == "__main__":
    show(recipes())
