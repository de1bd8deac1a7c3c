"""A run's programs: rematerialization for a budget of bytes."""

import jax
import numpy as np
import pytest

from gshard.mt.training.programs import Programs, Setup
from gshard.nn.strategy import ONE_DEVICE
from tests.mt.runs import run_config
from tests.nn import models


def made(corpus, remat):
    model = models.config(remat=remat)
    return Programs(Setup(run_config(corpus), model, jax.devices()[:1], ONE_DEVICE))


@pytest.fixture(scope="module")
def batch():
    return {name: np.asarray(x) for name, x in models.batch()._asdict().items()}


@pytest.mark.slow
def test_a_budget_that_no_step_fits_is_refused(corpus, batch):
    with pytest.raises(ValueError, match="bytes on each device even with rematerialization"):
        made(corpus, 1000).compile(batch)


@pytest.mark.slow
def test_a_budget_that_a_step_fits_changes_nothing(corpus, batch):
    found = []
    for remat in ("none", 1 << 40):
        programs = made(corpus, remat)
        programs.compile(batch)
        found.append(programs.step(programs.first_state(), batch))
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(a, b)
