"""Real processes without a parent: one dies, one ends, one runs something else."""

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import gshard
from gshard.mt.launch.local import free_port, member
from tests.mt.processes import PATIENCE, until

pytestmark = pytest.mark.slow  # processes that load JAX and wait for each other

# A command of `gshard`, so that its words and its exit status are what users see.
COMMAND = """
import os, pathlib, sys, time
from gshard import cli
from gshard.errors import UserError

def work():
    import numpy as np
    from jax.experimental import multihost_utils
    from gshard.mt import hosts
    from gshard.mt.launch.environment import find

    hosts._ALONE = 12
    me, what, folder = find(os.environ), sys.argv[1], pathlib.Path(sys.argv[2])
    apart = me.index if what == "settings" else 0
    hosts.start(me.count, me, settings={"model.experts": 8 + apart})
    multihost_utils.process_allgather(np.ones(3))
    (folder / f"met-{me.index}").touch()
    while True:
        if what == "refuses" and me.index == 1:
            raise UserError("no such corpus")
        if what == "all refuse":
            raise UserError("no such corpus")
        if what != "waits":
            multihost_utils.process_allgather(np.ones(3))
        time.sleep(0.05)

cli.app.command("work")(work)
cli.main(["work"])
"""


_started = []


@pytest.fixture(autouse=True)
def _nobody_is_left():
    yield
    for process in _started:
        process.kill()
        process.wait()
        process.stderr.close()
    _started.clear()


def start(what, folder, count, sources=(), members=None):
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    processes = []
    for told, index in members or [(count, index) for index in range(count)]:
        environment = {**os.environ, **member(address, told, index)}
        if index < len(sources):
            environment["PYTHONPATH"] = str(sources[index])
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, what, str(folder)],
            cwd=folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        _started.append(process)
    return processes


def ended(process):
    """The exit status, and the lines on standard error: no trace, neither of Python nor of C++."""
    said = process.communicate(timeout=PATIENCE)[1]
    said = re.sub(r"^W\d{4} .*\n", "", said, flags=re.MULTILINE)  # warnings
    for trace in ("Traceback", "stack trace", "coordination_service", " @ "):
        assert trace not in said, said
    lines = [line for line in said.splitlines() if "[Gloo]" not in line]
    return process.returncode, lines


@pytest.mark.parametrize("what", ["computes", "waits"])
@pytest.mark.parametrize("victim", [0, 1])
def test_who_is_killed_is_named_by_the_others(tmp_path, what, victim):
    processes = start(what, tmp_path, 3)
    until(lambda: all((tmp_path / f"met-{i}").exists() for i in range(3)))
    processes[victim].kill()
    name = f"process {victim} ({processes[victim].pid} on {socket.gethostname()})"
    want = f"gshard: {name} is gone; this process cannot continue alone"
    for process in processes:
        if process is not processes[victim]:
            assert ended(process) == (75, [want])


def test_who_ends_alone_says_why_and_the_others_who_it_was(tmp_path):
    first, second = start("refuses", tmp_path, 2)
    assert ended(second) == (1, ["gshard: no such corpus"])
    status, said = ended(first)
    assert status == 75
    assert said[0].startswith(f"gshard: process 1 ({second.pid} on ")


def test_what_all_refuse_all_say(tmp_path):
    for process in start("all refuse", tmp_path, 2):
        assert ended(process) == (1, ["gshard: no such corpus"])


def test_other_settings_are_refused(tmp_path):
    processes = start("settings", tmp_path, 2)
    name = f"process 1 ({processes[1].pid} on {socket.gethostname()})"
    want = (
        f"not all processes run the same as process 0: in {name} model.experts is '9' and not '8'"
    )
    for process in processes:
        assert ended(process) == (1, [f"gshard: {want}"])
    assert not (tmp_path / "met-0").exists()


def test_other_code_is_refused(tmp_path):
    here = Path(gshard.__file__).parents[1]
    shutil.copytree(here / "gshard", tmp_path / "other" / "gshard")
    changed = tmp_path / "other" / "gshard" / "nn" / "gating.py"
    changed.write_text(changed.read_text() + "\n# Changed.\n")
    processes = start("computes", tmp_path, 2, [here, tmp_path / "other"])
    for process in processes:
        status, (said,) = ended(process)
        assert status == 1
        assert said.endswith(" the source of gshard/nn/gating.py is another")


def test_other_numbers_of_processes_are_refused(tmp_path):
    first, second, third = start("computes", tmp_path, 3, members=[(2, 0), (3, 1), (3, 2)])
    status, (said,) = ended(third)
    assert status == 75
    assert said.startswith("gshard: process 0 knows of no process 2")
    for process in (first, second):
        status, (said,) = ended(process)
        assert status == 1
        assert said.endswith(" --processes is '3' and not '2'")


def test_one_number_for_two_processes_is_a_sentence(tmp_path):
    processes = start("computes", tmp_path, 3, members=[(2, 0), (2, 1), (2, 1)])
    first, *others = (ended(process) for process in processes)
    want = "gshard: two processes say that they are process 1, or it was started again alone"
    assert first == (75, [want])
    for status, (said,) in others:
        assert status == 75
        assert "process 1" in said or "process 0" in said


def test_a_platform_that_is_not_there_is_a_line(tmp_path):
    program = "from gshard import cli; from gshard.mt import hosts; "
    program += "cli.app.command('work')(lambda: hosts.start(0)); cli.main(['work'])"
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "JAX_PLATFORMS": "nonsense"},
        stderr=subprocess.PIPE,
        text=True,
    )
    status, (said,) = ended(process)
    assert status == 1
    assert said.startswith(
        "gshard: JAX could not be initialized: Unable to initialize backend 'nonsense'"
    )
