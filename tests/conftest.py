"""Eight virtual devices, quick Hypothesis settings, and padding that is poison."""

import gc
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, settings

from gshard.tensors import padding

jax.config.update("jax_num_cpu_devices", 8)

# XLA's emitter of fusions makes an MLIR context and a pipeline of passes for every fusion, and a
# small program is split into several modules: both take longer than generating its code. With the
# older emitter and one module the programs of tests compile three times as fast. The XLA of JAX
# 0.11 still has the older emitter, but writes invalid code with it for some operators on booleans.
# Processes that tests start inherit the flags. In JAX 0.10, too, the older emitter is not free of
# bugs: it computes wrong gradients for one large program (`without_older_emitter` has which).
COMPILING = ["--xla_cpu_parallel_codegen_split_count=1"]
OLDER_EMITTER = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
if jax.__version_info__ < (0, 11):
    COMPILING += [OLDER_EMITTER]
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *COMPILING])

settings.register_profile(
    "thorough",  # of `make test-all`
    deadline=None,
    max_examples=25,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
settings.register_profile("quick", settings.get_profile("thorough"), max_examples=8)
settings.load_profile("quick")


def poison(dtype):
    """The worst that could stand in padding."""
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(jnp.nan, dtype)
    if dtype == jnp.bool_:
        return jnp.asarray(True)
    return jnp.asarray(jnp.iinfo(dtype).max - 1, dtype)


SHARING = {"mt/training": "training"}  # folders in which all files share what is trained
HERE = Path(__file__).parent
# Training of thousands of steps, what is compared with XLA's own plan of memory, and functions that
# round otherwise when they are not optimized.
OPTIMIZED = {
    "test_languages.py", "test_memory.py", "test_resnet.py", "test_pointwise.py",
    "test_order.py", "test_reproducible.py",
}  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items):
    """Tests of models that share what was compiled or trained run in one process."""
    for item in items:
        place = item.path.relative_to(HERE)
        if place.parts[0] in ("mt", "nn"):
            group = SHARING.get(str(place.parent), str(place))
            item.add_marker(pytest.mark.xdist_group(group))


def pytest_collection_finish():
    """What was imported and collected stays: the garbage collector need not visit it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _compiled_quickly(request):
    """Most programs run for milliseconds: they are compiled without most optimizations.

    So are those of the processes that tests start: their numbers are compared.
    """
    quickly = request.path.name not in OPTIMIZED
    cache = jax.config.jax_compilation_cache_dir
    patch = pytest.MonkeyPatch()
    patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", str(int(quickly)))
    jax.config.update("jax_disable_most_optimizations", quickly)
    yield
    jax.config.update("jax_compilation_cache_dir", cache)
    patch.undo()


@pytest.fixture
def without_older_emitter(monkeypatch):
    """Processes that the test starts compile fusions as users' processes do.

    With the older emitter, XLA's code for a reproducible step of a Transformer with rows of 48
    tokens computes gradients that are wrong by up to 8%. Without XLA's fusions, without its
    algebraic simplification, or with today's emitter, the same program has the values of the usual
    one, to rounding.
    """
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"].replace(OLDER_EMITTER, ""))


@pytest.fixture(autouse=True, scope="session")
def _poisoned_padding():
    """Every place where gshard makes padding of its own puts poison there."""
    patch = pytest.MonkeyPatch()
    patch.setattr(padding, "garbage", poison)
    yield
    patch.undo()
