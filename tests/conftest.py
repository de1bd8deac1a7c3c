"""Eight virtual devices, quick Hypothesis settings, and padding that is poison."""

import collections
import functools
import gc
import os
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, settings
from jax.experimental.compilation_cache import compilation_cache
from jax.extend.core import Literal

from gshard.graph.history import History
from gshard.graph.regions import LOOPS, bodies
from gshard.propagation.stage import REWRITES
from gshard.tensors import padding

jax.config.update("jax_num_cpu_devices", 8)

# Most programs run for milliseconds, and compiling them is most of the time of the suite: LLVM's
# first level, without its expensive passes, in one module, as splitting takes longer than it saves
# for small programs. Level 0 (and so `jax_disable_most_optimizations`) would be faster still, but
# computes wrong gradients: `v == max(v)` is evaluated in two fusions, of which one contracts a
# product and a sum and one does not, so that no element is the largest. Processes that tests start
# inherit the flags.
os.environ["XLA_FLAGS"] = " ".join(
    (
        os.environ.get("XLA_FLAGS", ""),
        "--xla_cpu_parallel_codegen_split_count=1",
        "--xla_backend_optimization_level=1",
        "--xla_llvm_disable_expensive_passes=true",
    )
)

# Background jobs of a shell ignore Ctrl-C, those of nohup hangups too, and so would the processes
# that tests start and stop: what is handled here, they do not inherit.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)

settings.register_profile(
    "thorough",  # of `make test-all`
    deadline=None,
    max_examples=25,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
settings.register_profile("quick", settings.get_profile("thorough"), max_examples=2)
settings.load_profile("quick")


# Cycles are rare here and the heap is large: it is searched for them a fiftieth as often.
gc.set_threshold(35_000, 10, 10)


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
# Folders and files whose cases compile a program each.
COMPILING = {
    "autosharding", "benchmarks", "capture", "checking", "contrib", "moving", "nn", "planning",
    "programs", "propagation", "reproducible", "rules", "tensors", "test_habits.py",
    "test_manual.py", "test_memory_layouts.py", "test_one_sum.py",
    "test_repeated_calls.py", "test_transformations.py",
}  # fmt: skip


def pytest_make_parametrize_id(val):
    """Long cases have short names, which pytest-xdist sends and the environment has in turn."""
    return f"{val[:80]!r}..." if isinstance(val, str | bytes) and len(val) > 300 else None


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items):
    """Tests of a file share what was lowered, compiled or trained, and run in one process.

    Those of translation, some of which wait for other processes, come first: they do so while
    others compute. A function with several cases runs the first of every ten; the others are slow
    tests. Slow tests but those of translation run wherever a process is free, before quick ones.
    """
    places = {path: path.relative_to(HERE) for path in {item.path for item in items}}
    families = collections.Counter()
    for item in items:
        place = places[item.path]
        slow = item.get_closest_marker("slow") is not None
        if place.parts[0] in COMPILING and not slow:
            family = item.nodeid.partition("[")[0]
            if slow := families[family] % 10 > 0:
                item.add_marker(pytest.mark.slow)
            families[family] += 1
        if not slow or place.parts[0] == "mt":
            group = SHARING.get(str(place.parent), str(place))
            item.add_marker(pytest.mark.xdist_group(group))

    def turn(item):
        if places[item.path].parts[0] == "mt":
            return 0
        return 1 if item.get_closest_marker("xdist_group") is None else 2

    items.sort(key=turn)  # is stable


def pytest_collection_finish():
    """Modules and cases stay until the end: no search for cycles has to pass them."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _settings_restored():
    """A file that switches JAX's cache of compiled programs on leaves it as it was."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # once open, JAX uses it whatever the setting says


@pytest.fixture(autouse=True, scope="session")
def _poisoned_padding():
    """Every place where gshard makes padding of its own puts poison there."""
    patch = pytest.MonkeyPatch()
    patch.setattr(padding, "garbage", poison)
    yield
    patch.undo()


@pytest.fixture(autouse=True, scope="session")
def _defined_before_use():
    """A program that reads what nothing makes is an error in the name of the pass that made it.

    Later stages raise a KeyError, if anything.
    """
    patch, add = pytest.MonkeyPatch(), History.add

    def added(history, name, jaxpr, *rest, **others):
        check_defined(jaxpr, name)
        add(history, name, jaxpr, *rest, **others)

    def checked(title, rewrite):
        @functools.wraps(rewrite)
        def run(jaxpr, *args):
            rewritten = rewrite(jaxpr, *args)
            if rewritten is not jaxpr:
                check_defined(rewritten, title)
            return rewritten

        return run

    patch.setattr(History, "add", added)
    for title, (rewrite, otherwise) in REWRITES.items():  # propagated before they are added
        patch.setitem(REWRITES, title, (checked(title, rewrite), otherwise))
    yield
    patch.undo()


def check_defined(jaxpr, name):
    """Assert that every variable of a program is made before it is read, in loops too."""
    made = {*jaxpr.constvars, *jaxpr.invars}

    def check(atoms, reader):
        for atom in atoms:
            if type(atom) is not Literal and atom not in made:
                raise AssertionError(f"{name}: nothing makes {atom}, read by {reader}")

    for eqn in jaxpr.eqns:
        check(eqn.invars, eqn)
        made.update(eqn.outvars)
        for body in bodies(eqn) if eqn.primitive in LOOPS else ():
            check_defined(body, name)
    check(jaxpr.outvars, "who calls it")
