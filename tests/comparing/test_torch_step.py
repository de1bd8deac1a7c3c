"""A module of torch as a step: data parallel bytes, and batches of other sizes."""

import jax
import numpy as np
import pytest

from gshard.comparing.comparison import compare
from gshard.comparing.fits import fits
from gshard.comparing.step import Step
from gshard.forecast import hardware

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow


def test_a_module_is_compared_and_fits():
    module = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8))
    step = Step(module, (jax.ShapeDtypeStruct((8192, 64), np.float32),))
    found = compare(step, "h100")
    weights = 4 * (64 * 128 + 128 + 128 * 8)  # the gradient of the last bias is a constant
    assert [p.sent for p in found.programs] == [2 * weights * 7 // 8] * 2
    assert sum(row.xla - row.gshard for row in found.lines) == 0
    room = fits(step, hardware("h100"))
    assert room.fits
    assert room.batch == 8192 < room.largest
