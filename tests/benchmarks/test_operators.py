"""The paper's table of partitioned operators: growth on a device from 64 to 1024 devices."""

import pytest

from benchmarks.operators import OPERATORS, growth


@pytest.mark.parametrize("name", OPERATORS)
def test_work_and_communication_grow_as_in_the_papers_table(name):
    """To 0.01, as docs/results/paper.md says."""
    row = OPERATORS[name]
    compute, sent = growth(name)
    assert compute == pytest.approx(row.compute, abs=0.015)
    if row.communication is None:
        assert sent is None
    else:
        assert sent == pytest.approx(row.communication, abs=0.015)
