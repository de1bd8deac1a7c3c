"""JAX's checks for NaN and infinity: they see results, and no padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard.tensors import padding
from tests.oracle import assert_same, run
from tests.shows import shows


@shows("jax.debug_nans")
def test_debug_nans():
    step = gshard.jit(lambda x: jnp.log(gshard.split(x, 0, 8)))
    for _ in range(2):
        step(np.ones(8, np.float32))  # a program that runs by the quick way, then
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        step(-np.ones(8, np.float32))


POINTWISE = {
    "1 / x": lambda x: 1 / x,
    "0 / x": lambda x: 0 / x,
    "log": jnp.log,
    "irregular": lambda x: 1 / gshard.shard(x[:12], np.array([5, 1, 6])),
    "uneven and even": lambda x: (x / x, 1 / x[:8], (1 / x).sum()),
}


@shows("jax.debug_infs")
@pytest.mark.parametrize("name", POINTWISE)
@pytest.mark.parametrize("check", [jax.debug_infs, jax.debug_nans])
def test_padding_is_not_checked(name, check, monkeypatch):
    """13 rows on 8 devices: three rows are padding, in which JAX would find what is none."""
    monkeypatch.setattr(padding, "garbage", lambda dtype: jnp.zeros((), dtype))
    x, fn = np.arange(1, 14, dtype=np.float32), POINTWISE[name]
    step = gshard.jit(lambda x: fn(gshard.split(x, 0, 8)))
    before = step.lower(x).compile()
    with check(True):
        for call in (step, before, gshard.jit(step.__wrapped__), step.lower(x).compile()):
            assert_same(run(call, x), fn(x))
    assert_same(run(step, x), fn(x))


@pytest.mark.parametrize("check", [jax.debug_infs, jax.debug_nans])
def test_results_with_padding_are_checked(check):
    bad = 0.0 if check is jax.debug_infs else np.nan
    x = np.array([1, 2, bad, *range(4, 14)], np.float32)
    step = gshard.jit(lambda x: jnp.divide(1, gshard.split(x, 0, 8)))
    step(x)
    with check(True):
        for call in (step, step.lower(x).compile()):
            with pytest.raises(Exception, match="inf" if bad == 0 else "nan"):
                call(x)
