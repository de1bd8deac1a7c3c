"""A parent that starts the processes of a training, watches them, and starts them again.

In JAX a process that has lost another hangs, or is ended by C++ code after a while; nothing inside
it can be relied on. So the parent decides, from outside: a process that has ended, that is silent
or that makes no step for many times the usual time is named, all are ended, and all are started
again. Training resumes from the newest complete checkpoint. After repeated failures without a new
step in between, the parent gives up.
"""

from __future__ import annotations

import contextlib
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from gshard.errors import UserError
from gshard.mt.launch import status
from gshard.mt.launch.status import ALONE, WAITING, Status, is_second_request, stop_signals

_USER_ERRORS = (1, 2)  # exit statuses of what a user has to mend
# These may be silent for longer.
_BUSY = ("starting", "preparing", "compiling", "restoring", "loading", "counting", ALONE, "ending")
# What takes as long each time, unless it hangs.
_MEASURED = ("preparing", "compiling", "restoring", "saving", "writing")


class Child(Protocol):
    """A process that was started, here or on another host."""

    begun: float

    def poll(self) -> int | None:
        """Its exit status, if it has ended; a signal's number is negative."""

    def status(self) -> Status:
        """What it says of itself, in times of this machine's clock."""

    def send(self, number: int) -> None:
        """Send it a signal."""

    def end(self) -> None:
        """End it, whatever it does, and wait until it has."""

    def last_words(self) -> str:
        """The last line of its output."""


class Machines(Protocol):
    """Where processes are started."""

    look: float

    def capacity(self, wanted: int) -> int:
        """How many processes can be started now, of those that are wanted."""

    def start(self, command: Sequence[str], count: int, scratch: Path) -> Sequence[Child]:
        """Start `count` processes that know of each other."""


@dataclass(frozen=True)
class Timeouts:
    """What the parent puts up with; all times in seconds."""

    silent: float = 10.0  # without a sign of life
    busy: float = 60.0  # the same while it compiles, which leaves other threads little room
    lagging: float = 4.0  # the same, worth a word
    starting: float = 600.0  # until the first step, or for the first save: of unknown duration
    longest: float = 3.0  # for what has been done before, as a multiple of the longest time
    usual_steps: float = 20.0  # without a step, as a multiple of the usual one
    least: float = 15.0  # but never less than this
    stopping: float = 120.0  # to save after SIGTERM
    joining: float = 20.0  # between two looks at whether there are more machines
    failures: int = 3  # in a row, without a new step in between


@dataclass(frozen=True)
class Failure:
    """A process that failed, and how that was noticed."""

    index: int
    what: str  # in words
    status: int | None  # that it ended with

    def __str__(self) -> str:
        return f"process {self.index} {self.what}"


class Supervisor:
    """Runs `command` as several processes until it succeeds; `note` is called with what happens.

    Restarts use the command `again`, if given.
    """

    def __init__(
        self,
        machines: Machines,
        command: Sequence[str],
        count: int,
        note: Callable[[str], None],
        timeouts: Timeouts = Timeouts(),
        least: int = 0,
        again: Sequence[str] = (),
    ):
        self._machines, self._command = machines, list(command)
        self._again = list(again or command)
        self._count, self._least, self._note = count, least or count, note
        self._timeouts = timeouts
        self._asked = 0  # the signal that ended it all
        self._at_once = False  # a second one came: nothing is waited for any more
        self._paces: list[float] = []
        self._longest: dict[str, float] = {}  # seconds, by what was done
        self._started = 0  # processes of the last attempt
        self._left_out, self._room_then = 0, 0  # processes that failed too often
        self._moved = (0, 0.0)  # the newest step of all, and when it was seen
        self._best = -1  # the newest step of all attempts
        self._failed = 0.0  # when a failure was noticed, until there is a step again
        self._lagging: set[int] = set()

    def run(self) -> int:
        """The exit status of the launch: 0 when every process has done its work."""
        failures = 0
        with self._signals(), _scratch() as scratch:
            while True:
                count = self._room(self._count - self._left_out)
                if self._asked:
                    return 128 + self._asked
                before, began = self._best, time.monotonic()
                ended = self._attempt(scratch, count)
                if self._asked:
                    return 128 + self._asked
                if ended is None:
                    return 0
                self._command = self._again
                if isinstance(ended, str):
                    self._note(ended)
                    continue
                if ended.status in _USER_ERRORS:
                    self._note(f"{ended}; all are stopped")
                    return int(ended.status or 1)
                failures = 1 if self._best > before else failures + 1
                self._failed = time.monotonic()
                if failures < self._timeouts.failures:
                    after = f"{time.monotonic() - began:.0f} s after the start"
                    self._note(f"{ended} ({after}); all continue from the last checkpoint")
                elif count > self._least:
                    failures = 0
                    self._leave_out(self._count - count + 1)
                    self._note(f"{ended}; continuing with {count - 1} processes")
                else:
                    self._note(f"{ended}; given up after {failures} failures without a new step")
                    return 1

    def _room(self, wanted: int) -> int:
        """How many to start: all that are wanted, or as many as there are machines for."""
        told = False
        while (count := self._machines.capacity(wanted)) < self._least and not self._asked:
            if not told:
                self._note(f"there is room for {count} processes; waiting for {self._least}")
            told = True
            time.sleep(1.0)
        if count < wanted:
            self._note(f"{count} of {self._count} processes are started")
        return count

    def _attempt(self, scratch: Path, count: int) -> Failure | str | None:
        """Start all processes and watch them.

        Returns the first failure, or in words why they were stopped, or None if all is done.
        """
        children = self._machines.start(self._command, count, scratch)
        self._moved, self._lagging = (0, time.monotonic()), set()
        if count != self._started:  # others compile other programs, and save other parts
            self._started, self._longest = count, {}
        looked, stopping, why = time.monotonic(), 0.0, None
        try:
            while True:
                ended = [child.poll() for child in children]
                if stopping:
                    late = time.monotonic() - stopping > self._timeouts.stopping
                    if late or self._at_once or all(code is not None for code in ended):
                        return why
                elif failure := self._failure(children, ended):
                    return self._located(failure, children, scratch)
                elif all(code == 0 for code in ended):
                    return None
                elif self._asked or (why := self._more(count, looked)):
                    stopping = time.monotonic()
                    for child in children:
                        child.send(signal.SIGTERM)
                if time.monotonic() - looked > self._timeouts.joining:
                    looked = time.monotonic()
                time.sleep(self._machines.look)
        finally:
            for child in children:
                child.send(signal.SIGKILL)
            for child in children:
                child.end()

    def _more(self, count: int, looked: float) -> str | None:
        """Whether to stop and start again with more processes, in words."""
        if count >= self._count or time.monotonic() - looked <= self._timeouts.joining:
            return None
        room, before = self._machines.capacity(self._count), self._room_then
        self._room_then = room
        # Processes that are left out are retried when a new process appears, and not before.
        if room <= count or (self._left_out and room <= before):
            return None
        self._left_out = 0
        return f"there is room for {room} processes: all save and start again"

    def _leave_out(self, count: int) -> None:
        """Continue without so many of the processes that were asked for."""
        self._left_out, self._room_then = count, self._machines.capacity(self._count)

    def _failure(self, children: Sequence[Child], ended: Sequence[int | None]) -> Failure | None:
        # A process that was killed comes first: others fail because it is not there any more.
        for index, code in sorted(enumerate(ended), key=lambda item: item[1] or 0):
            if code:
                return Failure(index, _obituary(children[index], code), code)
        states: dict[int, Status] = {}
        now = time.monotonic()
        for index, (child, code) in enumerate(zip(children, ended, strict=True)):
            if code is not None:
                continue
            state = states[index] = child.status()
            silent = now - (state.seen or child.begun)
            limit = self._timeouts.silent if state.seen else self._timeouts.starting
            if state.doing in _BUSY:
                limit = max(limit, self._timeouts.busy)
            if state.stopped:  # whatever it was doing, it does not any more
                limit = self._timeouts.silent
            if silent > limit:
                return Failure(index, _hung("has been silent for", silent, state), None)
            lags = state.seen and state.doing not in _BUSY and silent > self._timeouts.lagging
            if lags and index not in self._lagging:
                self._lagging.add(index)
                self._note(f"process {index} {_hung('lags: silent for', silent, state)}")
            elif silent < 2.0:
                self._lagging.discard(index)
        return self._stuck(states, now)

    def _located(self, failure: Failure, children: Sequence[Child], scratch: Path) -> Failure:
        """The failure, after a word on who waits where; it is of the process that is waited for."""
        if failure.status in _USER_ERRORS:
            return failure
        found = status.held_up_by(scratch, len(children), lambda index: children[index].poll())
        if found is None:
            self._note(f"where they are: {status.steps([c.status() for c in children])}")
            return failure
        index, words = found
        self._note(f"where they are: {words}")
        if failure.status is not None or index == failure.index:
            return failure
        state = children[index].status()
        return Failure(index, f"{_where(state)}holds the others up {_when(state)}", None)

    def _stuck(self, states: dict[int, Status], now: float) -> Failure | None:
        """All give signs of life, and yet no step is made."""
        if all(state.doing in (WAITING, ALONE) for state in states.values()):
            return None
        for state in states.values():
            for doing, seconds in state.longest.items():
                self._longest[doing] = max(seconds, self._longest.get(doing, 0.0))
        newest = max(state.step for state in states.values())
        step, since = self._moved
        if newest > step:
            if step and self._failed:
                self._note(f"a step again after {_spent(states[min(states)], now - self._failed)}")
                self._failed = 0.0
            if step:
                self._paces = [*self._paces[-49:], (now - since) / (newest - step)]
            self._moved, self._best = (newest, now), max(self._best, newest)
            return None
        # A process that waits for others is in a step; the cause is another one, or the one behind.
        others = {i: s for i, s in states.items() if s.doing != "training"}
        index, state = min((others or states).items(), key=lambda i: (i[1].step, i[1].since))
        waited, limit = now - max(since, state.since), self._limit(state.doing, bool(newest))
        if waited > limit:
            self._allow(state.doing, waited)
            return Failure(index, _hung("has made no step for", waited, state), None)
        return None

    def _limit(self, doing: str, begun: bool) -> float:
        """The seconds for which no step may be made by who does that."""
        timeouts = self._timeouts
        if doing in _MEASURED and doing in self._longest:
            least = timeouts.busy if doing in _BUSY else timeouts.least
            return max(least, timeouts.longest * self._longest[doing])
        if doing in (*_BUSY, *_MEASURED) or not begun:
            return timeouts.starting
        usual = statistics.median(self._paces) if self._paces else 0.0
        return max(timeouts.least, timeouts.usual_steps * usual)

    def _allow(self, doing: str, seconds: float) -> None:
        """A disk may have got slower for good: what was taken for a hang may take longer now."""
        if doing in self._longest:
            most = self._timeouts.starting / self._timeouts.longest
            self._longest[doing] = max(self._longest[doing], min(seconds, most))

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def ask(number: int, frame: FrameType | None) -> None:
            self._at_once |= bool(self._asked) and is_second_request(number)
            self._asked = self._asked or number

        if threading.current_thread() is not threading.main_thread():
            yield  # signals are not ours to take
            return
        before = {each: signal.signal(each, ask) for each in stop_signals()}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)


def without_checkpoint(command: Sequence[str]) -> list[str]:
    """A command without `--checkpoint STEP`, which is for the first attempt only."""
    kept: list[str] = []
    words = iter(command)
    for word in words:
        if word == "--checkpoint":
            next(words, None)
        elif not word.startswith("--checkpoint="):
            kept.append(word)
    return kept


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A temporary folder for what processes say."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="gshard-launch-", ignore_cleanup_errors=True)
    except OSError as error:
        raise UserError(f"no temporary folder: {error.strerror}; TMPDIR names a place") from None
    with folder as name:
        yield Path(name)


def _spent(state: Status, seconds: float) -> str:
    """How long it took to be back, and what with; what comes first is to load the program."""
    in_order = sorted(state.spent, key=lambda doing: [*_BUSY, doing].index(doing))
    parts = {"loading Python": seconds - sum(state.spent.values())}
    parts |= {doing: state.spent[doing] for doing in in_order}
    told = ", ".join(f"{doing} {took:.1f}" for doing, took in parts.items() if took >= 0.1)
    return f"{seconds:.1f} s: {told}"


def _obituary(child: Child, code: int) -> str:
    state = child.status()
    how = f"was ended by {_signal_name(-code)}" if code < 0 else f"ended with {code}"
    words = child.last_words()
    return f"{_where(state)}{how} {_when(state)}" + (f": {words}" if words else "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # those of real time have no names
        return f"signal {number}"


def _where(state: Status) -> str:
    return f"({state.process} on {state.host}) " if state.host else ""


def _when(state: Status) -> str:
    after = f"after step {state.step:,}" if state.step else "before its first step"
    return f"{after}, while {state.doing}"


def _hung(how: str, seconds: float, state: Status) -> str:
    return f"{_where(state)}{how} {seconds:.0f} s {_when(state)}"
