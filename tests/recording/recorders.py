"""Recorders that have entered collectives, for tests."""

import os
import socket

from gshard.recording import files
from gshard.recording.files import Owner

TABLE = [{"kind": "all_reduce", "source": "train.py:9", "bytes": 4}] * 3
SUFFIXES = (".position", ".programs", ".ending")


def entered(recorder, count):
    program = recorder.program("step", TABLE)
    for number in range(count):
        recorder.enter(0, program, number % 3)
    return recorder


def own(run="0", index=0):
    """The name of this process's files."""
    return Owner(run, index, socket.gethostname(), os.getpid(), files.looked_at(os.getpid())[1])
