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
    """The processes that a process has started, in order, without what watches over them."""
    threads = Path(f"/proc/{parent}/task").glob("*/children")
    children = [pid for thread in threads for pid in thread.read_text().split()]
    names = {int(pid): Path(f"/proc/{pid}/comm").read_text().strip() for pid in children}
    return sorted(pid for pid, name in names.items() if name != "sh")
