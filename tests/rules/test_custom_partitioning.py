"""`custom_partitioning` functions whose program for one device has operators of every kind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning

from tests.oracle import check, even_split, random_array, sent

INSIDE = {
    "gather": lambda x: x[:, jnp.arange(5) * 2 % 3],
    "a row that is computed": lambda x: jnp.take_along_axis(x, jnp.argsort(x, axis=1), 1),
    "scatter": lambda x: x.at[:, jnp.arange(2) * 3].set(1.5),
    "scatter in a loop": lambda x: lax.fori_loop(0, 3, lambda i, x: x.at[:, i].add(2.0), x),
    "convolution": lambda x: lax.conv(x[:, None], jnp.ones((1, 1, 3)), (1,), "SAME")[:, 0],
    "branches": lambda x: lax.cond(jnp.sum(x[0, :1]) < 9, lambda x: x[:, ::-1], jnp.sin, x),
    "solver": lambda x: lax.custom_linear_solve(lambda v: 2 * v, x, lambda _, b: b / 2),
    "derivative": lambda x: jax.vmap(jax.grad(lambda r: jnp.sum(jax.nn.relu(r) ** 2)))(x),
    "window": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 3), (1, 1), "SAME"),
    "sort": lambda x: lax.sort((x, -x), dimension=1)[1],
    "random": lambda x: x + jax.random.normal(jax.random.key(0), x.shape[1:]),
}  # fmt: skip


@pytest.mark.parametrize("name", INSIDE)
def test_what_the_partition_computes(name):
    def called(x):
        return INSIDE[name](x)

    function = custom_partitioning(called)

    def partition(mesh, args, result):
        rows = result.sharding
        return mesh, called, rows, (rows,)

    function.def_partition(partition=partition, sharding_rule="i j -> i k")
    low = check(function, random_array((16, 6)), inputs=[even_split(2, 0, 8)], rtol=1e-4)
    assert sent(low) == 0
    assert np.prod(low.in_shardings[0].tiles) == 8
