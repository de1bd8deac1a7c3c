"""The learning rate by step."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gshard.errors import UserError
from gshard.mt.config import OptimizerConfig, fall_if_changeable
from gshard.mt.training.programs import schedule


def test_the_rate_rises_falls_with_the_root_and_then_in_a_line_to_zero():
    plain = schedule(OptimizerConfig(learning_rate=2.0, warmup=100, rise=50))
    drawn = schedule(OptimizerConfig(learning_rate=2.0, warmup=100, rise=50, fall=100, end=300))
    steps = np.array([0, 24, 49, 99, 200, 250, 299, 300, 400])
    highest = 2.0 / 10
    want = [highest / 50, highest / 2, highest, highest]
    np.testing.assert_allclose(plain(steps)[:4], want, rtol=1e-5)
    left = np.clip((300 - steps) / 100, 0, 1)
    np.testing.assert_allclose(drawn(steps), plain(steps) * left, rtol=1e-5)
    assert left[4] == 1
    assert left[-1] == 0


def test_a_fall_needs_an_end_that_it_fits_before():
    with pytest.raises(UserError, match=r"optimizer\.fall is 10 and optimizer\.end 5"):
        schedule(OptimizerConfig(fall=10, end=5))


@st.composite
def falls(draw):
    """No fall at all, or one that fits before its end."""
    end = draw(st.integers(0, 40))
    return OptimizerConfig(warmup=8, rise=4, fall=draw(st.integers(0, end)), end=end)


@given(falls(), falls(), st.integers(0, 40))
def test_a_fall_may_be_changed_only_while_no_step_depends_on_it(saved, wanted, done):
    before, after = (np.asarray(schedule(config)(np.arange(done))) for config in (saved, wanted))
    if fall_if_changeable(saved, wanted, done):
        np.testing.assert_array_equal(before, after)
    elif saved.begins_to_fall() != wanted.begins_to_fall() and done > 1:
        first = int(min(saved.begins_to_fall(), wanted.begins_to_fall())) + 1
        assert done <= first or before[first] != after[first]
