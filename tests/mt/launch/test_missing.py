"""Real processes without a parent: one dies, one ends, one runs something else."""

import os
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


def start(what, folder, count, sources=()):
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    processes = []
    for index in range(count):
        environment = {**os.environ, **member(address, count, index)}
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
    return processes


def ended(process):
    """The exit status, and the lines on standard error: no trace, neither of Python nor of C++."""
    said = process.communicate(timeout=PATIENCE)[1]
    for trace in ("Traceback", "stack trace", "coordination_service", " @ "):
        assert trace not in said, said
    return process.returncode, [line for line in said.splitlines() if "[Gloo]" not in line]


@pytest.mark.parametrize("what", ["computes", "waits"])
@pytest.mark.parametrize("victim", [0, 1])
def test_who_is_killed_is_named_by_the_others(tmp_path, what, victim):
    processes = start(what, tmp_path, 3)
    until(lambda: all((tmp_path / f"met-{i}").exists() for i in range(3)))
    processes[victim].kill()
    name = f"process {victim} ({processes[victim].pid} on {socket.gethostname()})"
    want = f"gshard: {name} is gone; this process cannot go on alone"
    for process in processes:
        if process is not processes[victim]:
            assert ended(process) == (75, [want])
    processes[victim].communicate()


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
