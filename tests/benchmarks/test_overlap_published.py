"""The forecast of published gains: a small layer of each kind."""

import pytest

from benchmarks.overlap_published import Llama, Row, experts_layer, gain, llama_layer, step
from gshard.forecast import hardware

LLAMA = llama_layer(Llama(1024, 8, 8, 4096, 8, 2048))


@pytest.mark.parametrize("program", [LLAMA, step(LLAMA), experts_layer(65_536, 16, 1024, 4096)])
def test_a_gain(program):
    before, share, after = gain(Row("", program, hardware("h100"), 1.0, ""))
    assert 0.01 < share < 0.9
    assert (1 - share) * before <= after < before
