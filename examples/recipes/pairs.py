"""All pairs of N bodies: the bodies are split, their forces are computed by rows or by columns.

Either way a device needs the positions of all bodies, and has the pairs of its own with all others.
By rows it has all the terms of its bodies' sums; by columns these sums would be sent as well. Both
splits are possible for every tensor of pairs: propagation prices both, whichever operand is first.
"""

import jax
import jax.numpy as jnp
from jax import lax

import gshard
from examples.recipes.recipe import D, Recipe, all_gather, all_reduce, show
from examples.recipes.transformer import SMALL, Size

STEPS = 4


def forces(x_N3):
    """By the inverse square of distances."""
    apart = x_N3[None] - x_N3[:, None]
    near = 1 / (jnp.sum(apart**2, axis=-1) + 1e-3) ** 1.5
    return jnp.sum(apart * near[..., None], axis=1)


def bodies(x_N3, v_N3):
    """Steps of an N-body simulation."""

    def step(_, state):
        x, v = state
        v = v + 1e-3 * forces(x)
        return x + 1e-3 * v, v

    return lax.fori_loop(0, STEPS, step, tuple(gshard.split(a, 0, D) for a in (x_N3, v_N3)))


def boids(x_N2, v_N2):
    """Steps of a flock: who is near aligns, keeps together and keeps apart."""

    def step(state, _):
        x, v = state
        apart = x[:, None] - x[None, :]
        square = (apart**2).sum(-1)
        near = (square < 0.1).astype(x.dtype)
        count = near.sum(1)[:, None]
        align = near @ v / count - v
        together = near @ x / count - x
        away = (apart * (near / (square + 1e-3))[..., None]).sum(1)
        v = v + 0.1 * align + 0.01 * together + 0.001 * away
        return (x + 0.1 * v, v), None

    start = tuple(gshard.split(a, 0, D) for a in (x_N2, v_N2))
    return lax.scan(step, start, None, length=STEPS)[0]


def energy(charges_N, x_N3):
    """A step that fits the charges of bodies: the gradient of a sum over all pairs."""

    def loss(charges):
        x, q = gshard.split(x_N3, 0, D), gshard.split(charges, 0, D)
        far = jnp.sqrt(jnp.sum((x[:, None] - x[None]) ** 2, axis=-1) + 1e-3)
        return jnp.sum(q[:, None] * q[None] * jnp.exp(-far) / far)

    value, grad = jax.value_and_grad(loss)(charges_N)
    return charges_N - 1e-3 * grad, value


def recipes(size: Size = SMALL) -> list[Recipe]:
    n = min(size.M**2 // 2, 65536)
    in_space, in_plane = (jax.ShapeDtypeStruct((n, d), jnp.float32) for d in (3, 2))
    charges = jax.ShapeDtypeStruct((n,), jnp.float32)
    return [
        Recipe("N bodies", bodies, (in_space, in_space), STEPS * all_gather(4 * 3 * n)),
        Recipe("boids", boids, (in_plane, in_plane), STEPS * 2 * all_gather(4 * 2 * n)),
        # Positions and charges, and what the others' pairs add to the gradient of a charge.
        Recipe("charges", energy, (charges, in_space),
               all_gather(4 * 4 * n) + all_gather(4 * n) + all_reduce(4)),
    ]  # fmt: skip


if __name__ == "__main__":
    show(recipes())
