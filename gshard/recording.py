"""Where each process is in its program: which collective it entered last, in a file beside it.

With the environment variable GSHARD_RECORD, every collective of a partitioned program is preceded
by a mark, which counts in a memory-mapped file: whoever reads the file from outside sees the number
even if the process hangs, is stopped or has been killed. A file has a row for each of the process's
devices: how many collectives it has entered, when it entered the last one, and which the newest
were. A second file says what the numbers mean, and a third one how the process ended, if it could
say so: one that was killed could not, those that fail because it is gone can. `python -m
gshard.recording FOLDER` reads the files of all processes and says who waits where, and for whom.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import math
import mmap
import os
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "GSHARD_RECORD"  # a folder; 1 for one among the temporary files; 0 for none
LAUNCHED = "GSHARD_LAUNCH_RECORD"  # the same from `gshard launch`, for programs on CPUs alone
KEPT = 256  # the newest collectives of a device
_ROW = struct.Struct(f"=qd{KEPT}Q")  # how many, when, and which
_COUNT, _ENTRY = struct.Struct("=qd"), struct.Struct("=Q")
_ROWS = 64  # devices of a process, at most
_POSITION, _PROGRAMS, _ENDING = ".position", ".programs", ".ending"
RUNNING, STOPPED, GONE = "running", "stopped", "gone"  # gone: it was killed
FAILED, ENDED = "failed", "ended"  # with an error; without one
BEHIND, ELSEWHERE = "behind", "elsewhere"
StatusOf = Callable[[int], int | None]  # the exit status of a process, once it has ended
_BEGUN = time.time()  # noqa: TID251  (compared with the times of files)


def folder(platform: str = "") -> Path | None:
    """Where positions of devices of this platform are kept; None if they are not."""
    launched = os.environ.get(LAUNCHED, "") if platform == "cpu" else ""
    named = os.environ.get(VARIABLE, "") or launched
    if named in ("", "0"):
        return None
    return Path(tempfile.gettempdir()) / "gshard-record" if named == "1" else Path(named)


class Recorder:
    """The files of this process, which is the one with this `index` among those of its run."""

    def __init__(self, place: Path, index: int):
        place.mkdir(parents=True, exist_ok=True)
        host = socket.gethostname()
        for old in place.glob(f"*-{host}-*{_POSITION}"):
            if _is_of_a_run_before(old, index):
                _remove(old)
        self._position = place / f"{index}-{host}-{os.getpid()}{_POSITION}"
        self._position.write_bytes(bytes(_ROW.size * _ROWS))
        with self._position.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._rows: dict[int, int] = {}  # of devices
        self._counts = [0] * _ROWS
        self._known: set[int] = set()
        self._lock = threading.Lock()
        self._ending = self._position.with_suffix(_ENDING).open("w")
        if not faulthandler.is_enabled():  # it may be the user's, who reads it elsewhere
            faulthandler.enable(self._ending)  # XLA aborts a process that has lost another one
        atexit.register(self._end, os.getpid())

    def _end(self, process: int) -> None:
        """Say how the process ended; the last one to end removes the files, if none failed."""
        if os.getpid() != process:  # a fork
            return
        error = getattr(sys, "last_value", None)
        print(ENDED if error is None else f"{type(error).__name__}: {error}", file=self._ending)
        self._ending.flush()
        paths = list(self._position.parent.glob(f"*{_POSITION}"))
        if all(_ending(path) == ENDED for path in paths):
            for path in paths:
                _remove(path)

    def program(self, name: str, collectives: Sequence[Mapping[str, Any]]) -> int:
        """The key of a program with these collectives, which is the same in all processes."""
        text = json.dumps({"name": name, "collectives": list(collectives)})
        key = zlib.crc32(text.encode())
        with self._lock:
            if key not in self._known:
                self._known.add(key)
                with _programs(self._position).open("a") as file:
                    print(json.dumps([key, json.loads(text)]), file=file)
        return key

    def enter(self, device: int, program: int, number: int) -> None:
        """A device enters a collective."""
        row = self._rows.get(device)
        if row is None:
            with self._lock:
                row = self._rows.setdefault(device, len(self._rows))
        if row >= _ROWS:
            return
        start, count = row * _ROW.size, self._counts[row]
        at = start + _COUNT.size + count % KEPT * _ENTRY.size
        _ENTRY.pack_into(self._map, at, program << 32 | number)
        self._counts[row] = count + 1
        _COUNT.pack_into(self._map, start, count + 1, time.monotonic())


_recorder: list[Recorder] = []


def recorder(place: Path, index: int) -> Recorder:
    """The recorder of this process, the `index`-th of its run."""
    if not _recorder:
        _recorder.append(Recorder(place, index))
    return _recorder[0]


def enter(device: int, program: int, number: int) -> None:
    """A device of this process enters a collective."""
    if _recorder:
        _recorder[0].enter(device, program, number)


def _programs(position: Path) -> Path:
    return position.with_suffix(_PROGRAMS)


def _ending(position: Path) -> str:
    """The error or exit status that a process left when it ended; none if it runs or was killed."""
    try:
        return position.with_suffix(_ENDING).read_text(errors="replace").partition("\n")[0]
    except OSError:
        return ""


def _is_of_a_run_before(position: Path, index: int) -> bool:
    """Whether a file is of a process that is gone, and not of the run that begins."""
    its, host, pid = _named(position)
    try:
        older = position.stat().st_mtime < _BEGUN
    except OSError:  # another process of this run has removed it
        return False
    return (older or its == index) and _state(host, pid) == GONE


def _remove(position: Path) -> None:
    for suffix in (_POSITION, _PROGRAMS, _ENDING):
        position.with_suffix(suffix).unlink(missing_ok=True)


# ---------------------------------------------------------------- reading


@dataclass(frozen=True)
class Site:
    """A collective: its number in `lowered.collectives`, of which program, what it is, its line."""

    program: str
    number: int
    kind: str
    source: str
    bytes: int = 0  # that a device sends

    def __str__(self) -> str:
        what = f"{self.kind} of {self.bytes:,} bytes" if self.bytes else self.kind
        return f"collective {self.number} of {self.program} ({what}, {self.source})"


@dataclass(frozen=True)
class Position:
    """A process: the collectives that its slowest device has entered, the newest last."""

    process: int
    host: str
    pid: int
    state: str  # "running", "stopped", "gone", "failed", "ended"; of another host, never "gone"
    entered: int
    seen: float  # when the last one was entered, by the machine's monotonic clock
    newest: tuple[Site, ...]
    failed_at: float = math.inf  # by the clock of the files
    error: str = ""  # with which it failed

    def __str__(self) -> str:
        state = "" if self.state == RUNNING else f", {self.state}"
        return f"process {self.process} ({self.pid} on {self.host}{state})"

    def at(self, count: int) -> Site | None:
        """The collective that was the `count`-th, as far as it is known."""
        first = self.entered - len(self.newest)
        return self.newest[count - 1 - first] if first < count <= self.entered else None


def read(place: Path, status_of: StatusOf = lambda index: None) -> list[Position]:
    """The positions of all processes that have files in a folder.

    `status_of` is the exit status of a process, if it has ended and who started it knows: a
    signal's number is negative.
    """
    every = [_position(path, status_of) for path in sorted(place.glob(f"*{_POSITION}"))]
    return sorted((p for p in every if p is not None), key=lambda p: p.process)


def _named(path: Path) -> tuple[int, str, int]:
    """The process, its host and its number there, of which a file is."""
    index, _, rest = path.stem.partition("-")
    host, _, pid = rest.rpartition("-")
    return int(index), host, int(pid)


def _state(host: str, pid: int) -> str:
    if host != socket.gethostname():
        return RUNNING
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return GONE if Path("/proc/self").exists() else RUNNING
    return {"T": STOPPED, "t": STOPPED, "Z": GONE, "X": GONE}.get(letter, RUNNING)


def _how_it_ended(status: int | None, ending: str) -> str | None:
    """The state of a process that has ended with a status, or with words of its own."""
    if status is None:
        return None if not ending else ENDED if ending == ENDED else FAILED
    by_another = status < 0 and status != -signal.SIGABRT  # XLA aborts those that lost another
    return GONE if by_another and not ending else FAILED if status else ENDED


def _position(path: Path, status_of: StatusOf) -> Position | None:
    try:
        index, host, pid = _named(path)
        raw = path.read_bytes()
        lines = _programs(path).read_text() if _programs(path).exists() else ""
        programs = dict(json.loads(line) for line in lines.splitlines())
    except (OSError, ValueError):
        return None
    rows = [_ROW.unpack_from(raw, start) for start in range(0, len(raw), _ROW.size)]
    used = [row for row in rows if row[0]]
    state = _state(host, pid)
    # Asked for afterwards: of a process that has ended by now it is known.
    status, ending = status_of(index), _ending(path)
    state = _how_it_ended(status, ending) or state
    error = ending if state == FAILED else ""
    failed_at = path.with_suffix(_ENDING).stat().st_mtime if error else math.inf
    if not used:
        return Position(index, host, pid, state, 0, 0.0, (), failed_at, error)
    count, seen, *ring = min(used, key=lambda row: row[0])
    newest = [ring[i % KEPT] for i in range(max(0, count - KEPT), count)]
    sites = tuple(_site(programs, entry) for entry in newest)
    return Position(index, host, pid, state, count, seen, sites, failed_at, error)


def _site(programs: Mapping[int, Any], entry: int) -> Site:
    program, number = entry >> 32, entry & 0xFFFFFFFF
    known = programs.get(program, {"name": "a program", "collectives": []})
    every = known["collectives"]
    unknown: dict[str, Any] = {"kind": "unknown", "source": "unknown"}
    told = every[number] if number < len(every) else unknown
    return Site(known["name"], number, told["kind"], told["source"], told.get("bytes", 0))


@dataclass(frozen=True)
class Standstill:
    """Who holds the others up, and where these wait."""

    culprits: tuple[Position, ...]
    waiting: tuple[Position, ...]
    where: Site | None  # that the others wait at
    instead: Site | None  # that the first of the culprits entered last, or in its place
    how: str  # "gone", "stopped", "failed", "elsewhere" or "behind"

    def __str__(self) -> str:
        if not self.culprits:
            return f"all processes wait at {self.where}, and none is behind"
        who, waiting = _names(self.culprits), _names(self.waiting)
        if self.how == ELSEWHERE:
            return f"{waiting} entered {self.where}; {who} took another way, to {self.instead}"
        last = f"entered {self.instead} last" if self.instead else "has entered none"
        state = {BEHIND: "is behind: it ", FAILED: "was the first to fail: it "}.get(self.how, "")
        errors = "".join(f"; {p.error}" for p in self.culprits if p.error)
        return f"{waiting} waits at {self.where}; {who} {state}{last}{errors}"


def _names(positions: Sequence[Position]) -> str:
    return ", ".join(map(str, positions)) or "nobody"


def standstill(positions: Sequence[Position]) -> Standstill | None:
    """Who holds the others up when nobody moves; None if nothing is known.

    All processes enter the same collectives one after the other. The first one in which they differ
    says who took another way: the fewer of them, even if others failed for it. Else it is a process
    that was killed or stopped (of several that are gone, the one that has entered the fewest), or
    has entered fewer collectives than the others, or was the first to fail.
    """
    last = max((p.entered for p in positions), default=0)
    if not last:
        return None
    first = max(p.entered - len(p.newest) for p in positions) + 1
    for count in range(first, last + 1):
        there = [(p, site) for p in positions if (site := p.at(count))]
        usual, _ = Counter(site for _, site in there).most_common(1)[0]
        if others := [(p, site) for p, site in there if site != usual]:
            rest = tuple(p for p, site in there if site == usual)
            return Standstill(tuple(p for p, _ in others), rest, usual, others[0][1], ELSEWHERE)
    for how in (GONE, STOPPED):
        culprits = [p for p in positions if p.state == how]
        if len(culprits) == len(positions):  # those that failed for the first one, too
            fewest = min(p.entered for p in culprits)
            culprits = [p for p in culprits if p.entered == fewest]
        if culprits:
            return _held_up(positions, culprits, how)
    if behind := [p for p in positions if p.entered < last]:
        return _held_up(positions, behind, BEHIND)
    failed = [p for p in positions if p.state == FAILED]
    return _held_up(positions, sorted(failed, key=lambda p: p.failed_at)[:1], FAILED)


def _held_up(positions: Sequence[Position], culprits: Sequence[Position], how: str) -> Standstill:
    waiting = [p for p in positions if p not in culprits]
    furthest = max(waiting or positions, key=lambda p: p.entered)
    where = furthest.at(furthest.entered)
    instead = culprits[0].at(culprits[0].entered) if culprits else None
    return Standstill(tuple(culprits), tuple(waiting), where, instead, how)


def main() -> None:
    """Print who waits where."""
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else folder()
    if place is None or not place.is_dir():
        sys.exit(f"gshard: {place or 'no folder'}: give the folder that {VARIABLE} names")
    found = standstill(read(place))
    print(found or "no process has entered a collective yet")


if __name__ == "__main__":
    main()
