"""The table of layouts beside experts: its rows, and cases that are what they say."""

import jax
import pytest

import gshard
from benchmarks.auto import Row, table
from benchmarks.auto_cases import CASES, haiku, moe

ROWS = [
    Row("a", "by hand", 2e-3, 100, 1e-3, 50, 9e-4, "8", "1 + 0", 3.0, "equal", 0.5),
    Row("b", "by hand", 1e-3, 0, 1.01e-3, 0, 9e-4, "2 x 4", "0 + 2", 61.0, "equal", 1.0),
]


def test_the_page_counts_what_is_better():
    page = table(ROWS, timed=True, hardware="h100")
    assert "| a | by hand | 2 | 1 | 0.500 | 0.50 | 0.9 | 8 | 1 + 0 | 3 | equal | 0.50 |" in page
    assert "1 of 2 are faster than the best expert; the largest ratio is 1.010." in page
    assert "values" not in table(ROWS, timed=False, hardware="h100")


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_experts_compute_what_the_program_computes(make):
    if make is haiku:
        pytest.importorskip("haiku")
    case = make(True)
    wanted = jax.eval_shape(case.fn, *case.arguments)
    for expert in case.experts.values():
        found = jax.eval_shape(expert, *case.arguments)
        assert jax.tree.leaves(found) == jax.tree.leaves(wanted)


def test_the_program_itself_has_no_annotations():
    case = moe(True)
    (expert,) = case.experts.values()
    assert gshard.jit(expert, devices=8).lower(*case.arguments).collectives
    assert not gshard.jit(case.fn, devices=8).lower(*case.arguments).collectives
