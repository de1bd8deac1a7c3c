"""A parent that starts the processes of a training, watches them, and starts them again.

In JAX a process that has lost another hangs, or is ended by C++ code after a while; nothing inside
it can be relied on. So the parent decides, from outside: a process that has ended, that is silent
or that makes no step for many times the usual is named, all are ended, and all are started again.
Training goes on from the newest whole checkpoint by itself. What fails again and again without a
new step in between is given up.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from gshard.mt.errors import UserError
from gshard.mt.launch import status

_LOOK = 0.2  # seconds between two looks at the processes
_USER_ERRORS = (1, 2)  # exit statuses of what a user has to mend
_BUSY = ("starting", "compiling")
_TAIL = 2_000  # bytes of a process's output to look for its last words in


@dataclass(frozen=True)
class Patience:
    """What the parent puts up with; all times in seconds."""

    silent: float = 10.0  # without a sign of life
    busy: float = 60.0  # the same while it compiles, which leaves other threads little room
    lagging: float = 4.0  # the same, worth a word
    starting: float = 600.0  # until the first step: compiling is slow
    saving: float = 600.0
    usual_steps: float = 20.0  # without a step, as a multiple of the usual one
    least: float = 15.0  # but never less than this
    stopping: float = 120.0  # to save after SIGTERM
    failures: int = 3  # in a row, without a new step in between


@dataclass(frozen=True)
class Failure:
    """A process that failed, and how that was noticed."""

    index: int
    what: str  # in words
    status: int | None  # that it ended with

    def __str__(self) -> str:
        return f"process {self.index} {self.what}"


@dataclass
class Child:
    """A process that was started."""

    index: int
    popen: subprocess.Popen[bytes]
    status_file: Path
    log: Path
    begun: float = field(default_factory=time.time)

    def status(self) -> status.Status:
        """What it says of itself."""
        return status.read(self.status_file)


class Supervisor:
    """Runs `command` as several processes until it succeeds; `note` is told what happens."""

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        note: Callable[[str], None],
        patience: Patience = Patience(),  # noqa: B008  (frozen)
        least: int = 0,
    ):
        self._command, self._count, self._note = list(command), count, note
        self._patience, self._least = patience, least or count
        self._asked = 0  # the signal that ended it all
        self._paces: list[float] = []
        self._moved = (0, 0.0)  # the newest step of all, and when it was seen
        self._best = -1  # the newest step of all attempts
        self._lagging: set[int] = set()

    def run(self) -> int:
        """The exit status of the whole: 0 when every process has done its work."""
        failures, missing = 0, 0
        with self._signals(), tempfile.TemporaryDirectory(prefix="gshard-launch-") as scratch:
            while True:
                before, began = self._best, time.time()
                failure = self._attempt(Path(scratch), self._count - missing)
                if self._asked:
                    return 128 + self._asked
                if failure is None:
                    return 0
                failures = 1 if self._best > before else failures + 1
                if failure.status in _USER_ERRORS:
                    self._note(f"{failure}; all are stopped")
                    return int(failure.status)
                again = time.time() - began
                if failures >= self._patience.failures and self._count - missing > self._least:
                    missing, failures = missing + 1, 0
                    self._note(f"{failure}; going on with {self._count - missing} processes")
                elif failures >= self._patience.failures:
                    self._note(f"{failure}; given up after {failures} failures without a new step")
                    return 1
                else:
                    self._note(
                        f"{failure} ({again:.0f} s after the start); all are started again, from "
                        "the newest whole checkpoint"
                    )

    def _attempt(self, scratch: Path, count: int) -> Failure | None:
        """Start all processes and watch them; the first failure, or None if there was none."""
        children = self._start(scratch, count)
        self._moved, self._lagging = (0, time.time()), set()
        stopping = 0.0
        try:
            while True:
                if self._asked and not stopping:
                    stopping = time.time()
                    for child in children:
                        child.popen.send_signal(signal.SIGTERM)
                ended = [child.popen.poll() for child in children]
                if self._asked and all(code is not None for code in ended):
                    return None
                if stopping:
                    if time.time() - stopping > self._patience.stopping:
                        return None
                elif failure := self._failure(children, ended):
                    return failure
                elif all(code == 0 for code in ended):
                    return None
                time.sleep(_LOOK)
        finally:
            self._end(children)

    def _failure(self, children: Sequence[Child], ended: Sequence[int | None]) -> Failure | None:
        for child, code in zip(children, ended, strict=True):
            if code:
                return Failure(child.index, self._obituary(child, code), code)
        alive = [c for c, code in zip(children, ended, strict=True) if code is None]
        states = {child.index: child.status() for child in alive}
        now = time.time()
        for child in alive:
            state = states[child.index]
            silent = now - (state.seen or child.begun)
            limit = self._patience.silent if state.seen else self._patience.starting
            if state.doing in _BUSY:
                limit = max(limit, self._patience.busy)
            if silent > limit:
                return Failure(child.index, _hung("has been silent for", silent, state), None)
            if state.seen and silent > self._patience.lagging and child.index not in self._lagging:
                self._lagging.add(child.index)
                self._note(f"process {child.index} {_hung('lags: silent for', silent, state)}")
            elif silent < 2.0:
                self._lagging.discard(child.index)
        return self._stuck(states, now)

    def _stuck(self, states: dict[int, status.Status], now: float) -> Failure | None:
        """All give signs of life, and yet no step is made."""
        if not states:
            return None
        newest = max(state.step for state in states.values())
        step, since = self._moved
        if newest > step:
            if step:
                self._paces = [*self._paces[-49:], (now - since) / (newest - step)]
            self._moved, self._best = (newest, now), max(self._best, newest)
            return None
        # Whoever waits for others is in a step; somebody else is the cause.
        others = {i: s for i, s in states.items() if s.doing != "training"}
        index, state = min((others or states).items(), key=lambda item: item[1].since)
        usual = statistics.median(self._paces) if self._paces else 0.0
        limit = max(self._patience.least, self._patience.usual_steps * usual)
        if state.doing in _BUSY or not newest:
            limit = self._patience.starting
        elif state.doing == "saving":
            limit = max(limit, self._patience.saving)
        waited = now - max(since, state.since)
        if waited > limit:
            return Failure(index, _hung("has made no step for", waited, state), None)
        return None

    def _obituary(self, child: Child, code: int) -> str:
        state = child.status()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        words = _last_words(child.log)
        return f"{_where(state)}{how} {_when(state)}" + (f": {words}" if words else "")

    def _start(self, scratch: Path, count: int) -> list[Child]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        children = []
        for index in range(count):
            place = scratch / f"status-{index}.json"
            place.unlink(missing_ok=True)
            log = scratch / f"log-{index}.txt"
            environment = {
                **os.environ,
                "GSHARD_COORDINATOR": address,
                "GSHARD_PROCESSES": str(count),
                "GSHARD_PROCESS": str(index),
                status.VARIABLE: str(place),
                **_gpus(index, count),
            }
            with log.open("wb") as file:
                # The first one's output is the user's; the others' is looked at if they fail.
                output = None if index == 0 else file
                popen = subprocess.Popen(
                    self._command,
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT if output else None,
                    start_new_session=True,  # Ctrl-C is for the parent to hand on
                )
            children.append(Child(index, popen, place, log))
        return children

    def _end(self, children: Sequence[Child]) -> None:
        for child in children:
            if child.popen.poll() is None:
                child.popen.kill()
        for child in children:
            child.popen.wait()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def ask(number: int, frame: FrameType | None) -> None:
            self._asked = number

        before = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)


def _where(state: status.Status) -> str:
    return f"({state.process} on {state.host}) " if state.host else ""


def _when(state: status.Status) -> str:
    after = f"after step {state.step:,}" if state.step else "before its first step"
    return f"{after}, while {state.doing}"


def _hung(how: str, seconds: float, state: status.Status) -> str:
    return f"{_where(state)}{how} {seconds:.0f} s {_when(state)}"


def _last_words(log: Path) -> str:
    """The last line of a process's output that is for people, and not a trace of C++ code."""
    try:
        text = log.read_bytes()[-_TAIL:].decode("utf-8", "replace")
    except OSError:
        return ""
    lines = [line.removeprefix("gshard: ").strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith(("@", "***", "PC:", "0x"))]
    return lines[-1][:300] if lines else ""


def _gpus(index: int, count: int) -> dict[str, str]:
    """Each process its share of this machine's GPUs, unless the user has dealt them out."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return {}
    there = len(list(Path("/dev").glob("nvidia[0-9]*")))
    mine = [str(gpu) for gpu in range(there) if gpu * count // max(there, 1) == index]
    return {"CUDA_VISIBLE_DEVICES": ",".join(mine)} if mine else {}


def gshard_command(arguments: Sequence[str]) -> list[str]:
    """The command line that runs gshard with this interpreter."""
    if not arguments or arguments[0] not in ("train",):
        raise UserError("what to launch? `gshard launch -n 4 train ...`")
    return [sys.executable, "-m", "gshard.cli", *arguments]
