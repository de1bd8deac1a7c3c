"""Fields in one tensor, as in a lattice Boltzmann step: each is moved by itself, as by an expert.

Rows of a field are sent that some tile needs of that field, however it is taken out of the stack
and put back, and rows of no other field.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle import check, random_array, sent

DOWN = (0, 1, 0, -1, 0, 1, -1, -1, 1)  # of the populations of D2Q9: six of them change rows
ALONG = (0, 0, 1, 0, -1, 1, 1, -1, -1)
ROWS, ROW = np.arange(8).reshape(1, 8, 1), 24 * 4


def moved(f, q):
    return jnp.roll(f, (DOWN[q], ALONG[q]), (0, 1))


def stacked(f):
    return jnp.stack([moved(f[q], q) for q in range(9)])


def concatenated(f):
    shifts = zip(DOWN, ALONG, strict=True)
    return jnp.concatenate([jnp.roll(f[q : q + 1], by, (1, 2)) for q, by in enumerate(shifts)])


def updated(f):
    for q in range(9):
        f = f.at[q].set(moved(f[q], q))
    return f


def in_the_last_dim(f):
    f = jnp.moveaxis(f, 0, -1)
    return jnp.stack([moved(f[..., q], q) for q in range(9)], -1)


def laplacians(f):
    padded = [jnp.pad(f[q], 1) for q in range(3)]
    return jnp.stack([u[2:, 1:-1] + u[:-2, 1:-1] for u in padded])


def differences(f):
    return f[1][2:] - f[1][:-2]


def upwind(f):
    u, v = f[0], f[1]
    return jnp.stack([u * (u - jnp.roll(u, 1, 0)), v * (v - jnp.roll(v, 1, 0))])


PROGRAMS = {
    stacked: (6, 12), concatenated: (6, 12), updated: (6, 12), in_the_last_dim: (6, 12),
    laplacians: (6, 12), differences: (2, 4), upwind: (2, 4),
}  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_each_field_sends_its_own_rows(program):
    field = random_array((9, 16, 24))
    forward, both = PROGRAMS[program]
    assert sent(check(program, field, inputs=[ROWS])) <= forward * ROW

    def gradient(f):
        return jax.grad(lambda f: jnp.sum(program(f) ** 2))(f)

    assert sent(check(gradient, field, inputs=[ROWS])) <= both * ROW


def laplacian(u):
    shifts = ((1, -2), (-1, -2), (1, -1), (-1, -1))
    return sum(jnp.roll(u, by, dim) for by, dim in shifts) - 4 * u


def test_padded_fields():
    lowered = check(laplacians, random_array((9, 16, 24)), inputs=[ROWS])
    assert sent(lowered) <= 6 * ROW


def test_fields_in_the_last_dim():
    """`vmap` moves the fields' dim to the front, and back."""
    vmapped = jax.vmap(laplacian, -1, -1)
    tiles = np.arange(8).reshape(8, 1, 1)
    assert sent(check(vmapped, random_array((16, 24, 2)), inputs=[tiles])) <= 4 * ROW


def test_staggered_fields():
    """Maxwell's equations on Yee's grid: two of three fields send a row, in one direction."""

    def step(state):
        e, f, h = state
        curl = (e[:-1, 1:] - e[:-1, :-1]) - (f[1:, :-1] - f[:-1, :-1])
        h = h.at[:-1, :-1].add(0.5 * curl)
        e = e.at[:, 1:].add(0.5 * (h[:, 1:] - h[:, :-1]))
        f = f.at[1:].add(-0.5 * (h[1:] - h[:-1]))
        return jnp.stack([e, f, h])

    assert sent(check(step, random_array((3, 16, 24)), inputs=[ROWS])) <= 2 * ROW


def test_finite_volumes():
    """Euler's equations between ghost cells: fields are moved, and so is the stack: twice as much
    as by hand."""

    def step(state):
        q = jnp.pad(state, ((0, 0), (1, 1)), mode="edge")
        mass, momentum, energy = q
        u = momentum / mass
        pressure = 0.4 * (energy - 0.5 * momentum * u)
        flux = jnp.stack([momentum, momentum * u + pressure, u * (energy + pressure)])
        speed = jnp.abs(u) + jnp.sqrt(1.4 * jnp.abs(pressure) / mass)
        most = jnp.maximum(speed[1:], speed[:-1])
        between = 0.5 * (flux[:, 1:] + flux[:, :-1]) - 0.5 * most * (q[:, 1:] - q[:, :-1])
        return state - 0.1 * (between[:, 1:] - between[:, :-1])

    state, tiles = 2 + jnp.abs(random_array((3, 64))), np.arange(8).reshape(1, 8)
    assert sent(check(step, state, inputs=[tiles])) <= 2 * 6 * 4


def test_fields_that_a_window_reads_beside_others():
    """A pool reads other fields than those whose rows are fetched together."""

    def fn(f):
        padded = jnp.pad(f[1:4], ((0, 0), (1, 1), (0, 0)))
        pooled = jax.lax.reduce_window(padded, 0.0, jax.lax.add, (1, 3, 1), (1, 1, 1), "VALID")
        return f[:2, 1:] - f[:2, :-1], pooled

    check(fn, random_array((5, 16, 12)), inputs=[np.arange(8).reshape(1, 8, 1)])


def test_both_dims_split():
    """On 2 x 4: rows of half of the columns, columns of half of the rows, and corners."""
    tiles = np.arange(8).reshape(1, 2, 4)
    lowered = check(stacked, random_array((9, 16, 24)), inputs=[tiles])
    assert sent(lowered) <= 4 * (6 * 6 + 6 * 8)


def test_fields_split_send_no_rows():
    """Where the fields themselves are split, nothing is cut out of them."""
    tiles = np.arange(8).reshape(8, 1, 1)
    lowered = check(lambda f: jnp.roll(f, 1, 1), random_array((8, 16, 24)), inputs=[tiles])
    assert sent(lowered) == 0


TAKE = (lambda f, q: f[q], lambda f, q: f[q : q + 1], lambda f, q: jnp.take(f, q, 0))


def padded(u, n):
    u = jnp.pad(u, [(0, 0)] * (u.ndim - 2) + [(2, 2), (0, 0)])
    return u[..., 2 + n : n - 2 or None, :]


MOVES = (
    padded,
    lambda u, n: jnp.roll(u, n, -2),
    lambda u, n: jnp.roll(u, (n, 1), (-2, -1)),
    lambda u, n: jnp.concatenate([u[..., n + 2 :, :], u[..., : n + 2, :]], -2),
    lambda u, n: jnp.flip(u, -2) + n,
    lambda u, n: u.at[..., 1:-1, :].set(u[..., 2:, :] - u[..., :-2, :]),
)  # fmt: skip
FIELD = st.tuples(
    st.sampled_from(TAKE), st.integers(0, 4), st.sampled_from(MOVES), st.integers(-2, 1)
)


def checked(fields, rows, dim, devices):
    def program(f):
        found = []
        for take, q, move, n in fields:
            u = move(take(f, q), n)
            found.append(u.reshape(-1, *u.shape[-2:]) * (q + 1))
        return jnp.concatenate(found)

    def both(f):
        return program(f), jax.grad(lambda f: jnp.sum(jnp.sin(program(f))))(f)

    tiles = np.arange(devices).reshape([devices if d == dim else 1 for d in range(3)])
    check(both, random_array((5, rows, 6)), devices=devices, inputs=[tiles], atol=1e-4)


DRAWN = (
    st.lists(FIELD, min_size=2, max_size=6), st.sampled_from([8, 13, 16]),
    st.sampled_from([1, 1, 0, 2]), st.sampled_from([2, 4, 8]),
)  # fmt: skip


@given(*DRAWN)
def test_drawn_fields(fields, rows, dim, devices):
    checked(fields, rows, dim, devices)


@pytest.mark.slow
@settings(max_examples=100)
@given(*DRAWN)
def test_many_drawn_fields(fields, rows, dim, devices):
    checked(fields, rows, dim, devices)
