"""docs/results/paper.md and the command that runs and times its rows."""

import sys

from tools import reproduce
from tools.reproduce import PAGE, Row, rows


def test_every_row_has_a_command_or_is_as_above():
    found = rows(PAGE.read_text())
    assert len(found) > 15
    for row in found:
        assert len(row.cells) == 5, row.line
        assert row.command or row.cells[1] == "as above"


def test_the_processor_time_of_a_command_and_of_its_children():
    """Of a process that a process starts, too; the output of neither is swallowed."""
    burn = "import time\\nwhile time.process_time() < 0.5: pass"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', '{burn}'])"
    assert 0.5 <= reproduce.seconds_of(f'{sys.executable} -c "{program}"') < 5


def test_times_are_written_into_their_rows():
    row = Row("| a claim | `make layer` | minutes | what came out | none |")
    assert row.with_time(reproduce.shown(41.2)) == (
        "| a claim | `make layer` | 41 s | what came out | none |"
    )
    assert reproduce.shown(200) == "3 min"
    assert Row("| b | `gshard study` | 2 min on one H200 | c | d |").needs_gpu
