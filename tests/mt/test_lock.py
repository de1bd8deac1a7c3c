"""One training at a time in a folder."""

import os
import socket
import subprocess
import sys

import pytest

from gshard.mt.errors import UserError
from gshard.mt.lock import locked

HOLDER = """
import sys, pathlib
from gshard.mt.lock import locked
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


def test_nothing_is_left_where_nothing_came_of_it(tmp_path):
    with pytest.raises(ZeroDivisionError), locked(tmp_path / "run"):
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == []
