"""Kinds of operators: all scatters are alike, whatever they do with their updates."""

import jax
import jax.numpy as jnp
import pytest

import gshard
from gshard.graph.kinds import ALIASES, APART, KERNELS, PRODUCTS, REDUCTIONS, SCATTERS


@pytest.mark.parametrize("how", ["set", "add", "subtract", "multiply", "min", "max"])
def test_a_scatter_is_an_operator_of_its_own_that_touches_its_rows(how):
    def fn(x, rows, at):
        return jnp.tanh(getattr((2 * x).at[at], how)(jnp.cos(rows)))

    shapes = ((4096, 64), jnp.float32), ((8, 64), jnp.float32), ((8,), jnp.int32)
    args = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    found = gshard.jit(fn, devices=1, hardware="h100").lower(*args).forecast().operators
    (scatter,) = [t for t in found if t.name.startswith("scatter")]
    assert "more" not in scatter.name
    assert scatter.bytes < 4096 * 64 * 4 / 10


def test_kinds_do_not_overlap():
    kinds = [PRODUCTS, REDUCTIONS, ALIASES, APART]
    assert sum(map(len, kinds)) == len(set().union(*kinds))
    assert SCATTERS | KERNELS < APART
