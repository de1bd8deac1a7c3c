"""What a process and its parent tell each other: signals to stop, a status, where it waits.

A thread writes the status every second, so that a process that is stopped falls silent, while one
that waits for the others does not. The file is for this machine only, at a path that the parent
chooses. Times are those of the monotonic clock, which all processes of a machine share. The parent
creates the file, and it is written in place, which works on a full disk.

When processes are given up, the collectives that they are at say who waits for whom
(`gshard.recording`): each process keeps them on CPUs unless GSHARD_RECORD is 0, on GPUs with
GSHARD_RECORD=1. Without it, the statuses say in which step each process is.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from gshard import recording

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def stop_signals() -> list[signal.Signals]:
    """Ctrl-C, SIGTERM, and SIGHUP of a terminal that is closed.

    SIGTERM is what clusters send some time before they take a machine away. A signal that is
    ignored stays ignored: SIGHUP under `nohup`, Ctrl-C in the background of a shell.
    """
    return [each for each in _STOPPING if signal.getsignal(each) not in (signal.SIG_IGN, None)]


def is_second_request(number: int) -> bool:
    """Whether this signal, after another, means to stop at once.

    A shell and the system both send SIGHUP when a terminal is closed: that is one request.
    """
    return number != signal.SIGHUP


def belong_to_parent() -> None:
    """For a worker: its parent alone decides when it stops.

    Terminals and clusters send signals to all processes of a group, and a training that saves may
    need its workers until then.
    """
    for each in _STOPPING:
        signal.signal(each, signal.SIG_IGN)
    end_with_parent()


def end_with_parent() -> None:
    """For a worker: it ends when its parent has, also when that was killed and could not say so."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_too() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_too, name="parent", daemon=True).start()


VARIABLE = "GSHARD_STATUS"  # the file's path
SIZE = 4096  # bytes of the file, which a status fits in many times
_SECONDS = 1.0
# No step has to be made while a process waits, for others or for text, or works by itself.
WAITING, ALONE = "waiting", "working alone"


@dataclass(frozen=True)
class Status:
    """The status of one process, at a moment."""

    host: str = ""
    process: int = 0  # the operating system's number
    step: int = 0  # the last one that is done
    doing: str = "starting"
    since: float = 0.0  # when it began to do that
    seen: float = 0.0  # when this was written
    spent: Mapping[str, float] = field(default_factory=dict)  # seconds of what it did before
    longest: Mapping[str, float] = field(default_factory=dict)  # the same, of a single time
    stopped: bool = False  # by SIGSTOP: what its parent knows of it


class Reporter:
    """Writes this process's status; does nothing without a parent that asked for it."""

    def __init__(self, path: str | os.PathLike[str] | None = None):
        self._path = Path(path) if path else None
        self._now = Status(socket.gethostname(), os.getpid(), since=time.monotonic())
        self._ended = threading.Event()
        if self._path:
            self._write()
            threading.Thread(target=self._keep_writing, name="status", daemon=True).start()

    @property
    def doing(self) -> str:
        """The last reported activity."""
        return self._now.doing

    def tell(self, doing: str, step: int | None = None) -> None:
        """From now on the process does `doing`, and `step` steps are done."""
        now = self._now
        step = now.step if step is None else step
        if (doing, step) != (now.doing, now.step):
            clock = time.monotonic()
            took = clock - now.since
            spent = {**now.spent, now.doing: now.spent.get(now.doing, 0.0) + took}
            self._now = replace(now, step=step, doing=doing, since=clock, spent=spent)
            self.took(now.doing, took)

    def took(self, doing: str, seconds: float) -> None:
        """So long it took to do that, here or in the background."""
        before = self._now.longest
        longest = {**before, doing: max(seconds, before.get(doing, 0.0))}
        self._now = replace(self._now, longest=longest)

    def close(self) -> None:
        """Say that the process ends, and write no more."""
        self._ended.set()
        self.tell("ending")
        if self._path:
            self._write()

    def _keep_writing(self) -> None:
        while not self._ended.wait(_SECONDS):
            self._write()

    def _write(self) -> None:
        assert self._path is not None
        text = json.dumps({**asdict(self._now), "seen": time.monotonic()}).encode()
        record = b"%08x" % zlib.crc32(text) + text
        with contextlib.suppress(OSError):
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.pwrite(file, record.ljust(SIZE), 0)
            finally:
                os.close(file)


def is_watched() -> bool:
    """Whether a parent watches this process, which then decides what becomes of it."""
    return bool(os.environ.get(VARIABLE))


def read(path: Path) -> Status:
    """The status that a process wrote last; an empty one if there is none, or half of one."""
    try:
        record = path.read_bytes().rstrip(b" ")
        if int(record[:8], 16) != zlib.crc32(record[8:]):
            return Status()
        return Status(**json.loads(record[8:]))
    except (OSError, ValueError, TypeError, RecursionError):
        return Status()


def reporting() -> contextlib.closing[Reporter]:
    """A context with a reporter for the parent that started this process, if it is watched."""
    return contextlib.closing(Reporter(os.environ.get(VARIABLE)))


_FOLDER = "record"


def recorded(scratch: Path) -> dict[str, str]:
    """The variables with which processes keep their positions in a new folder, if they are to."""
    asked = os.environ.get(recording.VARIABLE, "")
    if asked == "0":
        return {}
    place = scratch / _FOLDER
    shutil.rmtree(place, ignore_errors=True)  # of the attempt before
    return {recording.VARIABLE if asked else recording.LAUNCHED: str(place)}


def held_up_by(
    scratch: Path, count: int, status_of: recording.StatusOf = lambda index: None
) -> tuple[int, str] | None:
    """Which of `count` processes holds the others up, in words too; None if that is not known.

    A process may start others, which record as runs of their own.
    """

    def status(index: int) -> int | None:
        return status_of(index) if index < count else None

    every = recording.read(scratch / _FOLDER, status)
    for positions in recording.by_run([p for p in every if p.process < count]).values():
        found = recording.standstill(positions)
        if found is not None and found.culprits:
            return found.culprits[0].process, str(found)
    return None


def steps(states: Sequence[Status]) -> str:
    """In which step each process is, for a run that keeps no more than that."""
    now = time.monotonic()
    told = [
        f"process {index} ({state.process} on {state.host}) after step {state.step:,}, "
        f"{state.doing} for {now - state.since:.0f} s{', stopped' if state.stopped else ''}"
        for index, state in enumerate(states)
        if state.host
    ]
    return "; ".join(told)
