import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def compile_quickly(request):
    """These programs run for milliseconds: compile them fast, not well, except in slow tests."""
    slow = request.module.__name__.endswith("test_languages")
    jax.config.update("jax_disable_most_optimizations", not slow)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
