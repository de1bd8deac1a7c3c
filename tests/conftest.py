"""Eight virtual devices, quick Hypothesis settings, and padding that is poison."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, settings

from gshard import padding

jax.config.update("jax_num_cpu_devices", 8)

settings.register_profile(
    "quick",
    deadline=None,
    max_examples=25,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
settings.load_profile("quick")


def poison(dtype):
    """The worst that could stand in padding."""
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(jnp.nan, dtype)
    if dtype == jnp.bool_:
        return jnp.asarray(True)
    return jnp.asarray(jnp.iinfo(dtype).max - 1, dtype)


@pytest.fixture(autouse=True, scope="session")
def _poisoned_padding():
    """Every place where gshard makes padding of its own puts poison there."""
    patch = pytest.MonkeyPatch()
    patch.setattr(padding, "garbage", poison)
    yield
    patch.undo()
