"""The page of programs that XLA's partitioner gets wrong: what it says of gshard."""

from pathlib import Path

import pytest

from benchmarks.xla_bugs import cases, measure

PAGE = Path(__file__).parents[2] / "docs/results/xla-bugs.md"
STATED = [
    [cell.strip() for cell in line.split("|")[1:-1]]
    for line in PAGE.read_text().splitlines()
    if line.startswith(("| xla", "| jax", "| gshard"))
]


def test_the_page_has_every_program():
    assert [(report, what) for report, what, *_ in STATED] == [(c.report, c.what) for c in cases()]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "stated"), [*zip(cases(), STATED, strict=True)])
def test_what_it_says_of_gshard(case, stated):
    """What `jax.jit` makes of a program changes with JAX."""
    found = measure(case)
    assert [found["gshard.jit"], found["check of gshard's"]] == [stated[3], stated[5]]
