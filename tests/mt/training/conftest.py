"""A trained run, and compiled programs that are kept, for all tests of training."""

import jax
import pytest

from gshard.mt import hosts
from gshard.mt.run import Run
from gshard.mt.training.loop import Hooks, train
from tests.mt.runs import Notes, run_config


@pytest.fixture(scope="package", autouse=True)
def _compiled_once(tmp_path_factory):
    """The same programs come up again and again here."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("programs")))
    hosts.cache_programs()
    yield
    jax.config.update("jax_compilation_cache_dir", None)


@pytest.fixture(scope="package")
def whole(corpus, tmp_path_factory):
    """A run of 12 steps that nothing interrupted."""
    run = Run.create(tmp_path_factory.mktemp("whole") / "run", run_config(corpus))
    outcome = train(run, Hooks(Notes()))
    assert (outcome.step, outcome.signal) == (12, 0)
    return run
