"""docs/results/partition.md: bytes of XLA's program on CPUs, and on accelerators."""

import pytest

import gshard
from benchmarks.partition import kilobytes, sent
from benchmarks.programs import programs
from tests.documents import ROOT


@pytest.mark.parametrize("name", ["matmul, contracting dim split, result split"])
def test_xlas_bytes_on_accelerators_are_those_of_the_page(name):
    (program,) = (p for p in programs() if p.name == name)
    lowered = gshard.jit(program.fn, partitioner="xla").lower(*program.args)
    text = lowered.compile().as_text()
    page = (ROOT / "docs" / "results" / "partition.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith(f"| {name} |"))
    found = [kilobytes(program.needed), kilobytes(sent(text)), kilobytes(sent(text, True))]
    cells = [cell.strip() for cell in row.strip("|").split(" | ")]
    assert found == [cells[1], cells[3], cells[4]]
    assert sent(text, True) == program.needed < sent(text)
