"""A terminal that is closed, and a pipe that nobody reads: the work goes on."""

import os
import pathlib
import subprocess
import sys

import pytest

from gshard.commands.show import screen
from tests.mt.processes import PATIENCE, until

# The display of a training, which draws from a thread of its own on a terminal.
WORK = """
import pathlib, signal, sys, time
from gshard.commands.show import TrainDisplay
from gshard.commands.show import console
from gshard.commands.show import screen

signal.signal(signal.SIGHUP, signal.SIG_IGN)
figures = {"kind": "train", "nll": 1.0, "tokens_per_second": 1.0, "share_of_matmul": 0.5}
figures |= {"padding": 0.1, "data_wait": 0.0, "skipped": 0}
with TrainDisplay() as display:
    stage = display.stage("encode", 1)
    for step in range(1, 7):
        display.note(f"a line {step}")
        display.update({**figures, "step": step}, 6, 1.0)
        if step == 3:
            pathlib.Path("begun").touch()
            while not pathlib.Path("gone").exists():
                time.sleep(0.02)
        time.sleep(0.3)
    stage("done")
console.print("summary")
screen(stderr=True).print("and errors")
pathlib.Path("worked").touch()
sys.exit(7)
"""


@pytest.mark.slow  # loads the packages of the display
@pytest.mark.parametrize("how", ["terminal", "pipe"])
def test_who_cannot_be_read_works_on(tmp_path, how):
    here, there = os.openpty() if how == "terminal" else os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", WORK],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[3])},
        stdin=subprocess.DEVNULL,
        stdout=there,
        stderr=there,
    )
    os.close(there)
    until(lambda: (tmp_path / "begun").exists() or process.poll() is not None)
    said = os.read(here, 1 << 16)
    os.close(here)
    (tmp_path / "gone").touch()
    assert process.wait(PATIENCE) == 7, said
    assert b"a line " in said
    assert (tmp_path / "worked").exists()


@pytest.mark.slow
def test_who_is_in_a_hurry_does_not_wait_for_a_reader(monkeypatch):
    """As of `gshard launch | less`, and on a terminal after Ctrl-S."""
    here, there = os.pipe()
    with os.fdopen(there, "w") as stream, os.fdopen(here, "rb") as reader:
        monkeypatch.setattr(sys, "stdout", stream)
        console = screen(hurried=True)
        for line in range(5000):  # more than a pipe takes
            console.print(f"line {line}", "x" * 100, soft_wrap=True)
        os.set_blocking(here, False)
        taken = reader.read()
        monkeypatch.undo()
    assert taken.startswith(b"line 0")
    assert b"line 4999" not in taken
