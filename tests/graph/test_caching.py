"""What is kept across lowerings is dropped with JAX's own caches."""

import jax
import jax.numpy as jnp
import numpy as np

import gshard
from gshard.graph.caching import cached
from gshard.moving.nodes import code_of


def test_results_are_kept_until_the_caches_are_cleared():
    calls = []

    @cached
    def doubled(x):
        calls.append(x)
        return 2 * x

    assert [doubled(3), doubled(3)] == [6, 6]
    jax.clear_caches()
    assert doubled(3) == 6
    assert calls == [3, 3]


def test_programs_are_lowered_and_run_after_that():
    def fn(x):
        return jnp.cumsum(gshard.split(x, 0, 8)[::-1], 0)

    x = np.arange(48.0, dtype=np.float32).reshape(24, 2)
    first = gshard.jit(fn)(x)
    assert code_of.cache_info().currsize
    jax.clear_caches()
    assert not code_of.cache_info().currsize
    np.testing.assert_array_equal(gshard.jit(fn)(x), first)
