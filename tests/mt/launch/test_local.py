"""Children whose parent is killed: they end, whatever they are doing."""

import os
import signal
import subprocess
import sys
import time

import pytest

from gshard.mt.launch import local
from gshard.mt.launch.local import LocalChild
from tests.mt.processes import alive, until

PARENT = """
import pathlib, sys, time
from gshard.mt.launch.local import LocalChild

child = LocalChild([sys.executable, "-c", sys.argv[1]], {}, pathlib.Path("child"), quiet=True)
print(child._popen.pid, flush=True)
time.sleep(1000)
"""
SAVES = """
import os, pathlib, signal, time
def save(*_):
    pathlib.Path("saved").touch()
    os._exit(0)
signal.signal(signal.SIGTERM, save)
pathlib.Path("ready").touch()
time.sleep(1000)
"""
DEAF = """
import pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path("ready").touch()
time.sleep(1000)
"""
STOPPED = """
import os, pathlib, signal
pathlib.Path("ready").touch()
os.kill(os.getpid(), signal.SIGSTOP)
"""
WITH_HELPER = """
import pathlib, signal, subprocess, time
helper = subprocess.Popen(["sleep", "1000"], preexec_fn=lambda: signal.signal(15, signal.SIG_IGN))
pathlib.Path("helper").write_text(str(helper.pid))
pathlib.Path("ready").touch()
time.sleep(1000)
"""


def killed(child, folder):
    """Kill a parent of this child; the child's number, when it has ended."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, child], cwd=folder, stdout=subprocess.PIPE, text=True
    )
    pid = int(parent.stdout.readline())
    until((folder / "ready").exists)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: not alive(pid))


def test_a_child_is_asked_to_stop_when_its_parent_is_killed(tmp_path):
    killed(SAVES, tmp_path)
    assert (tmp_path / "saved").exists()


@pytest.mark.slow
@pytest.mark.parametrize("child", [DEAF, STOPPED])
def test_a_child_that_does_not_stop_is_killed(tmp_path, child):
    killed(child, tmp_path)
    assert local.SECONDS < 10


@pytest.mark.slow
def test_helpers_of_a_child_end_with_it(tmp_path):
    killed(WITH_HELPER, tmp_path)
    helper = int((tmp_path / "helper").read_text())
    until(lambda: not alive(helper))


def test_a_child_that_ends_leaves_no_process_behind(tmp_path):
    """Neither its helpers nor what watches over it."""
    program = "import subprocess; print(subprocess.Popen(['sleep', '1000']).pid)"
    child = LocalChild([sys.executable, "-c", program], {}, tmp_path / "child", quiet=True)
    shell = child._keeper._shell
    until(lambda: child.poll() is not None)
    helper = int((tmp_path / "child.log").read_text())
    until(lambda: not alive(helper))
    assert shell.poll() == 0
    child.end()


def test_what_cannot_be_started_is_not_watched_over(tmp_path, monkeypatch):
    made = []
    before = local.Keeper.__init__
    monkeypatch.setattr(
        local.Keeper, "__init__", lambda self: (before(self), made.append(self._shell))[0]
    )
    with pytest.raises(FileNotFoundError):
        LocalChild([str(tmp_path / "nothing")], {}, tmp_path / "child", quiet=True)
    assert made[0].poll() == 0


WORKER = """
import multiprocessing, os, time
from gshard.mt.launch.status import belong_to_parent

def work():
    belong_to_parent()
    print(os.getpid(), flush=True)
    time.sleep(1000)

if __name__ == "__main__":
    multiprocessing.get_context("spawn").Process(target=work).start()
    time.sleep(1000)
"""


@pytest.mark.slow
def test_a_worker_minds_its_parent_only(tmp_path):
    (tmp_path / "work.py").write_text(WORKER)
    owner = subprocess.Popen([sys.executable, "work.py"], cwd=tmp_path, stdout=subprocess.PIPE)
    worker = int(owner.stdout.readline())
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        os.kill(worker, number)
    time.sleep(0.2)  # signals that would end it
    assert alive(worker)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    until(lambda: not alive(worker))


GATHERING = """
import os, pathlib, time
from gshard.mt.data.gather import GatherConfig, _parallel

def work(item):
    print(os.getpid(), flush=True)
    time.sleep(1000)

if __name__ == "__main__":
    list(_parallel(work, [1, 2], GatherConfig(pathlib.Path("corpus"), jobs=2)))
"""


@pytest.mark.slow
def test_workers_that_gather_end_with_their_parent(tmp_path):
    (tmp_path / "work.py").write_text(GATHERING)
    owner = subprocess.Popen([sys.executable, "work.py"], cwd=tmp_path, stdout=subprocess.PIPE)
    workers = [int(owner.stdout.readline()) for _ in range(2)]
    owner.kill()
    owner.wait()
    owner.stdout.close()
    until(lambda: not any(map(alive, workers)))
