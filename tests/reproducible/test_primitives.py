"""Operators of reproducible programs, in the forms that they have on GPUs."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from jax.extend.core import primitives

from gshard.reproducible.rules import scatter_by_loop


@pytest.mark.parametrize("batched", [False, True])
def test_a_loop_of_updates_has_the_bits_of_a_scatter_in_order(batched):
    """The form for GPUs; on CPUs XLA's own scatter applies updates one after the other."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 5, 3)).astype(np.float32)
    indices = rng.integers(-1, 7, (2, 4, 6))  # many in one row, some of them in none
    updates = rng.normal(size=(2, 4, 6, 3)).astype(np.float32)

    def add(x, indices, updates):
        return x.at[indices].add(updates, mode="drop")

    args = (x, indices, updates) if batched else (x[0], indices[0], updates[0])
    (eqn, *_) = [
        e
        for e in jax.make_jaxpr(jax.vmap(add) if batched else add)(*args).jaxpr.eqns
        if e.primitive is primitives.scatter_add_p
    ]
    operands = [np.asarray(a) for a in args]
    operands[1] = np.where(operands[1] < 0, operands[1] + x.shape[1], operands[1])[..., None]
    if batched:
        assert eqn.params["dimension_numbers"].operand_batching_dims
    looped = jax.jit(functools.partial(scatter_by_loop, **eqn.params))(*operands)
    plain = jax.jit(functools.partial(primitives.scatter_add_p.bind, **eqn.params))(*operands)
    assert np.asarray(looped).tobytes() == np.asarray(plain).tobytes()
    assert np.abs(np.asarray(looped) - operands[0]).max() > 1
