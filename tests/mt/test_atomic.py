"""One training at a time in a folder."""

import os
import re
import socket
import subprocess
import sys

import pytest

from gshard.errors import UserError
from gshard.mt import atomic
from gshard.mt.atomic import OWNER, locked

HOLDER = """
import sys, pathlib
from gshard.mt.atomic import locked
with locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_second_is_refused_with_the_firsts_host_and_process(tmp_path):
    folder = tmp_path / "run"
    first = subprocess.Popen(
        [sys.executable, "-c", HOLDER, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert first.stdout.readline() == b"held\n"
    who = f"process {first.pid} on {socket.gethostname()}"
    with pytest.raises(UserError, match=who), locked(folder):
        pass
    first.kill()  # what is killed holds nothing
    first.wait()
    with locked(folder):
        assert (folder / ".lock-owner.json").exists()
    first.stdin.close()
    first.stdout.close()


@pytest.fixture
def held(tmp_path):
    """Locks belong to open files: one process is refused to itself as another would be."""
    with locked(tmp_path / "run"):
        yield tmp_path / "run"


@pytest.mark.parametrize("removed", [[".lock"], [".lock", ".lock-owner.json"]])
def test_a_lock_that_is_removed_still_holds(held, removed):
    for name in removed:
        (held / name).unlink()
    with pytest.raises(UserError, match="is being trained in by"), locked(held):
        pass


def test_where_folders_cannot_be_locked_the_holder_notices(tmp_path, monkeypatch):
    """As on NFS: the first takes its lock back, or says who came."""
    monkeypatch.setattr(atomic, "_hold_folder", lambda *_: True)
    with locked(tmp_path) as first:
        assert first.intruder() == ""
        (tmp_path / ".lock").unlink()
        assert first.intruder() == ""  # it holds the new one
        with pytest.raises(UserError, match="is being trained in"), locked(tmp_path):
            pass
        (tmp_path / ".lock").unlink()
        with locked(tmp_path):
            assert re.search(
                rf"was removed .* trained in by process {os.getpid()} on", first.intruder()
            )


def test_a_lock_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "precious").write_text("years of it")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="is a link to another file"), locked(tmp_path / "run"):
        pass
    assert (tmp_path / "precious").read_text() == "years of it"


def test_nothing_is_left_where_nothing_came_of_it(tmp_path):
    with pytest.raises(ZeroDivisionError), locked(tmp_path / "run"):
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("owner", "said"),
    [
        ("[" * 100_000, "another process"),
        ('{"process": ' + "[" * 100_000, "another process"),
        ('{"process": {}, "host": "a"}', "another process"),
        ('{"process": 1e999, "host": "a"}', "another process"),
        ('{"process": 7, "host": "\\u001b[2J"}', "process 7"),
        ('{"process": 7, "host": ["a"]}', "process 7 on ['a']"),
        ("{}", "another process"),
        ("5", "another process"),
        ("\0", "another process"),
    ],
)
def test_whatever_the_owners_file_holds_it_is_one_line(tmp_path, owner, said):
    with locked(tmp_path):
        (tmp_path / OWNER).write_text(owner)
        with pytest.raises(UserError) as refused, locked(tmp_path):
            pass
    assert str(refused.value) == f"{tmp_path} is being trained in by {said}"


def test_an_owner_that_is_a_pipe_is_not_waited_for(tmp_path):
    with locked(tmp_path):
        (tmp_path / OWNER).unlink()
        os.mkfifo(tmp_path / OWNER)
        with pytest.raises(UserError, match="by another process"), locked(tmp_path):
            pass
