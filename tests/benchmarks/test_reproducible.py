"""The benchmark of reproducible programs: steps of a recipe, on some devices and on one."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import reproducible


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("devices", [2, 3, 8])
def test_a_recipe_has_the_same_bits_as_on_one_device(devices, dtype):
    steps = reproducible.cases(devices, dtype, "data parallel, Adam")
    found = [reproducible.measured(case, 3, usual=False)["bits"] for case in steps]
    assert found == ["equal"]


def test_a_digest_tells_bits_apart():
    x = jnp.float32([0.0, 1.0])
    assert reproducible.digest((x, jax.random.key(0))) == reproducible.digest(
        (x, jax.random.key(0))
    )
    assert reproducible.digest(x) != reproducible.digest(jnp.float32([-0.0, 1.0]))
