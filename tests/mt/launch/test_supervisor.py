"""The parent with made-up processes: dead, stopped, stuck, wrong; named, and started again."""

import dataclasses
import signal
import socket
import subprocess
import sys
import time

import pytest

from gshard.mt.launch.local import ThisMachine
from gshard.mt.launch.supervisor import Supervisor, Timeouts, without_checkpoint
from tests.mt.processes import PATIENCE, until

pytestmark = pytest.mark.slow  # processes that are started, stopped and watched

# A process that makes steps until `fault` says otherwise, on its first attempt only.
WORKER = """
import os, pathlib, signal, sys, time
from gshard.mt.launch.status import reporting

folder, fault, after = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
index = os.environ["GSHARD_PROCESS"]
tries = folder / f"tries-{index}"
tries.write_text(str(int(tries.read_text()) + 1 if tries.exists() else 1))
faulty = index == "1" and (fault.endswith("always") or tries.read_text() == "1")
signal.signal(signal.SIGTERM, lambda *_: (folder.joinpath(f"saved-{index}").touch(), os._exit(143)))
with reporting() as reporter:
    for step in range(1, 20):
        reporter.tell("training", step)
        if faulty and step > after:
            time.sleep(1.5)  # a status is written every second
            if fault.startswith("die"):
                print("gshard: words before the end", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            if fault.startswith("stop"):
                os.kill(os.getpid(), signal.SIGSTOP)
            if fault.startswith("stick"):
                reporter.tell("reading a batch", step)
                time.sleep(1000)
            if fault.startswith("wrong"):
                print("gshard: no such corpus", flush=True)
                sys.exit(1)
        if fault == "wait" or (fault == "wait-first" and tries.read_text() == "1" and index == "0"):
            folder.joinpath(f"here-{index}").touch()
            time.sleep(1000)
        if fault.endswith("always") and os.environ["GSHARD_PROCESSES"] != "1":
            time.sleep(1000)  # nobody is ahead of the one that dies
        if faulty or fault == "none":
            time.sleep(0.02)
    if fault not in ("none", "wait-first") and tries.read_text() == "1":
        time.sleep(1000)  # for the other one, as in a collective
"""
QUICK = Timeouts(silent=3.0, lagging=2.0, usual_steps=20, least=9.0, starting=60.0, stopping=20.0)


@pytest.fixture
def supervised(tmp_path):
    def run(fault, after=3, timeouts=QUICK, machines=None, **options):
        machines = machines or ThisMachine()
        notes = []
        command = [sys.executable, "-c", WORKER, str(tmp_path), fault, str(after)]
        supervisor = Supervisor(machines, command, 2, notes.append, timeouts, **options)
        return supervisor.run(), notes

    return run


def test_nothing_happens(supervised):
    assert supervised("none") == (0, [])


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("die", "was ended by SIGKILL after step {}, while training: words before the end"),
        ("stop", "has been silent for"),
        ("stick", "has made no step for"),
    ],
)
def test_who_fails_is_named_and_all_are_started_again(supervised, tmp_path, fault, said):
    status, notes = supervised(fault)
    assert status == 0
    (note,) = [note for note in notes if "continue from" in note]
    assert note.startswith("process 1 (")
    assert socket.gethostname() in note
    assert said.split("{}")[0] in note
    assert {path.read_text() for path in tmp_path.glob("tries-*")} == {"2"}
    if fault == "stick":
        assert "while reading a batch" in note


def test_what_fails_without_end_is_given_up(supervised, tmp_path):
    status, notes = supervised("die-always", after=0)
    assert status == 1
    assert "given up after 3 failures without a new step" in notes[-1]
    assert (tmp_path / "tries-1").read_text() == "3"


def test_one_that_does_not_come_back_is_left_out(supervised, tmp_path):
    status, notes = supervised("die-always", after=0, least=1)
    assert status == 0
    assert "continuing with 1 processes" in notes[-1]
    assert (tmp_path / "tries-1").read_text() == "3"


def test_what_a_user_has_to_mend_is_not_tried_again(supervised, tmp_path):
    status, notes = supervised("wrong", after=0)
    assert status == 1
    assert notes == [notes[0]]
    assert "no such corpus; all are stopped" in notes[0]
    assert (tmp_path / "tries-1").read_text() == "1"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_handed_on_and_waited_for(tmp_path, number):
    """In a process of its own, since the handlers are."""
    program = f"""
import sys
from gshard.mt.launch.local import ThisMachine
from gshard.mt.launch.supervisor import Supervisor
command = [sys.executable, "-c", {WORKER!r}, {str(tmp_path)!r}, "wait", "0"]
sys.exit(Supervisor(ThisMachine(), command, 2, print).run())
"""
    parent = subprocess.Popen([sys.executable, "-c", program])
    deadline = time.monotonic() + 60
    while not all((tmp_path / f"here-{i}").exists() for i in range(2)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    parent.send_signal(number)
    assert parent.wait(60) == 128 + number
    assert all((tmp_path / f"saved-{i}").exists() for i in range(2))


def test_a_second_signal_ends_those_that_do_not_stop(tmp_path):
    deaf = "import pathlib, signal, sys, time; signal.signal(15, signal.SIG_IGN); "
    deaf += "pathlib.Path(sys.argv[1]).touch(); time.sleep(1000)"
    program = f"""
import sys
from gshard.mt.launch.local import ThisMachine
from gshard.mt.launch.supervisor import Supervisor, Timeouts
command = [sys.executable, "-c", {deaf!r}, {str(tmp_path / "here")!r}]
sys.exit(Supervisor(ThisMachine(), command, 1, print, Timeouts(stopping=1e9)).run())
"""
    parent = subprocess.Popen([sys.executable, "-c", program])
    until((tmp_path / "here").exists)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        assert parent.poll() is None
        parent.send_signal(number)
        time.sleep(0.5)
    assert parent.wait(PATIENCE) == 143


class Growing(ThisMachine):
    """Room for one process at first, and for all when that one has begun."""

    def __init__(self, begun):
        self._begun = begun

    def capacity(self, wanted):
        return wanted if self._begun.exists() else 1


def test_when_a_machine_comes_back_all_save_and_start_again_with_it(supervised, tmp_path):
    timeouts = dataclasses.replace(QUICK, joining=1.0)
    machines = Growing(tmp_path / "here-0")
    status, notes = supervised("wait-first", timeouts=timeouts, machines=machines, least=1)
    assert status == 0
    assert [note for note in notes if "lags" not in note] == [
        "1 of 2 processes are started",
        "there is room for 2 processes: all save and start again",
    ]
    assert (tmp_path / "saved-0").exists()
    assert (tmp_path / "tries-1").read_text() == "1"


def test_going_back_is_for_the_first_attempt_only():
    words = ["train", "run", "--checkpoint", "8", "a=b"]
    assert without_checkpoint(words) == ["train", "run", "a=b"]
    assert without_checkpoint(["train", "--checkpoint=8", "--out", "x"]) == ["train", "--out", "x"]
