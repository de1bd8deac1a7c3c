"""Processes that tests start, looked at from outside."""

import time
from pathlib import Path

PATIENCE = 600  # seconds: machines that run tests are busy


def alive(pid):
    """Whether a process runs; one that has ended may wait for somebody to ask for its status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(happens):
    """Wait for something to happen."""
    deadline = time.monotonic() + PATIENCE
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def launched(parent):
    """The processes that `gshard launch` has started, in order, without their keepers."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for pid in children if Path(f"/proc/{pid}/comm").read_text().strip() != "sh"]
