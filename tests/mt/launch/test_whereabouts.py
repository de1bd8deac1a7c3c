"""What a parent says of processes that make no step: who waits where."""

import re
import sys

import pytest

from gshard import recording
from gshard.mt.launch import status
from gshard.mt.launch.local import ThisMachine
from gshard.mt.launch.status import Status
from gshard.mt.launch.supervisor import Supervisor, Timeouts

# Makes steps of three collectives each; process 1 does not enter the second one of step 3.
WORKER = """
import os, pathlib, time
from gshard import recording
from gshard.mt.launch.status import reporting

index = int(os.environ["GSHARD_PROCESS"])
recorder = recording.Recorder(recording.folder(), index)
lines = [{"kind": "all_reduce", "source": f"train.py:{n}"} for n in range(3)]
program = recorder.program("step", lines)
with reporting() as reporter:
    for step in range(1, 4):
        for number in range(3):
            if step == 3 and number == (1 if index == 1 else 2):
                time.sleep(1000)
            recorder.enter(0, program, number)
        reporter.tell("training", step)
"""


def test_processes_keep_their_positions_only_if_they_are_to(monkeypatch, tmp_path):
    monkeypatch.setenv(recording.VARIABLE, "0")
    assert status.recorded(tmp_path) == {}
    assert status.held_up_by(tmp_path, 3) is None
    monkeypatch.setenv(recording.VARIABLE, "1")
    (place,) = status.recorded(tmp_path).values()
    for index, entered in enumerate([3, 2, 3]):
        recorder = recording.Recorder(tmp_path / "record", index)
        program = recorder.program("step", [{"kind": "all_reduce", "source": "train.py:9"}] * 3)
        for number in range(entered):
            recorder.enter(0, program, number)
    index, words = status.held_up_by(tmp_path, 3)
    assert index == 1
    assert "waits at collective 2 of step (all_reduce, train.py:9)" in words
    monkeypatch.delenv(recording.VARIABLE)
    assert status.recorded(tmp_path) == {recording.LAUNCHED: place}  # and another attempt
    assert status.held_up_by(tmp_path, 3) is None
    assert place == str(tmp_path / "record")


def test_steps_are_told_of_those_who_have_begun():
    states = [Status("red", 811, 17, "training"), Status(), Status("red", 813, 16, "saving")]
    words = status.steps(states)
    assert words.startswith("process 0 (811 on red) after step 17, training for ")
    assert "process 1" not in words
    assert "process 2 (813 on red) after step 16, saving for " in words


@pytest.mark.slow  # as long as the parent is patient
def test_a_parent_blames_the_process_that_the_others_wait_for(monkeypatch):
    monkeypatch.setenv(recording.VARIABLE, "1")
    notes = []
    timeouts = Timeouts(usual_steps=1, least=5.0, starting=30.0, failures=1)
    command = [sys.executable, "-c", WORKER]
    assert Supervisor(ThisMachine(), command, 3, notes.append, timeouts).run() == 1
    where, given_up = [note for note in notes if "lags" not in note]
    assert "process 0" in where.partition(" waits at collective 1 of step")[0]
    assert "process 1" in where.partition("is behind: it entered collective 0 of step")[0]
    (who,) = re.findall(r"process 1 \(\d+ on [^,)]+", where)
    assert given_up.startswith(f"{who}) ")
