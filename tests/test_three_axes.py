"""Programs as people write them, for arguments on a mesh of three axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gshard
from tests.oracle import random_array
from tests.shows import shows
from tests.test_habits import same


def counted_loop(x, keys):
    def body(carry):
        i, x, key = carry
        return i + 1, jnp.roll(x, 1, 0) / 2 + x, jax.random.split(key)[0]

    steps, x, key = lax.while_loop(
        lambda c: (c[0] < 4) & (jnp.max(c[1]) < 100), body, (0, x, keys[0])
    )
    return steps, x, jax.random.normal(key, (3,)), jax.vmap(jax.random.uniform)(keys)


def implicit_root(x, keys):
    def solve(f, start):
        return lax.while_loop(
            lambda y: jnp.any(jnp.abs(f(y)) > 1e-5), lambda y: y - f(y) / (2 * y), start
        )

    def root(a):
        return lax.custom_root(
            lambda y: y * y - a, jnp.ones_like(a), solve, lambda g, y: y / g(jnp.ones_like(y))
        )

    return jax.value_and_grad(lambda a: jnp.sum(root(a)))(jnp.abs(x) + 1), 2.0


def in_batches(x, keys):
    scanned = lax.associative_scan(jnp.multiply, x, axis=0), lax.cummax(x, 1, reverse=True)
    return scanned, lax.map(lambda row: jnp.sort(row) * 2, x, batch_size=3), jnp.where(True, 1, 2)


@shows("a mesh of three axes, weak results included")
@pytest.mark.parametrize(
    "fn",
    [
        implicit_root,
        pytest.param(counted_loop, marks=pytest.mark.slow),
        pytest.param(in_batches, marks=pytest.mark.slow),
    ],
)
def test_a_mesh_of_three_axes(fn):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("a", "b", "c"))
    x = jax.device_put(random_array((8, 12)), NamedSharding(mesh, PartitionSpec("a", ("c", "b"))))
    keys = jax.device_put(
        jax.random.split(jax.random.key(0), 8), NamedSharding(mesh, PartitionSpec(("b", "a")))
    )
    jitted = gshard.jit(fn)
    wanted = jax.jit(fn)(x, keys)
    for _ in range(2):  # the second call passes by Python
        got = jitted(x, keys)
        same(got, wanted)
        assert all(leaf.sharding.mesh == mesh for leaf in jax.tree.leaves(got))
