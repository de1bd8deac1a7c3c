"""Where processes are, by the files that they have written."""

from __future__ import annotations

import contextlib
import json
import math
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gshard.recording import files
from gshard.recording.files import ENDED, ENDING, FAILED, GONE, KEPT, PROGRAMS, ROWS, SLOT, Owner
from gshard.untrusted import printable, read_bytes

StatusOf = Callable[[int], int | None]  # the exit status of a process, once it has ended
_LONGEST = 1 << 26  # bytes of a description of programs
_DAMAGED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True)
class Site:
    """A collective: its number in `lowered.collectives`, of which program, what it is, its line."""

    program: str
    number: int
    kind: str
    source: str
    bytes: int = 0  # that a device sends

    def __post_init__(self) -> None:
        for name in ("program", "kind", "source"):  # read from a file
            object.__setattr__(self, name, printable(getattr(self, name)))

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
    run: str = "0"  # that it is a process of

    def __str__(self) -> str:
        state = "" if self.state == files.RUNNING else f", {self.state}"
        return f"process {self.process} ({self.pid} on {self.host}{state})"

    def at(self, count: int) -> Site | None:
        """The collective that was the `count`-th, as far as it is known."""
        first = self.entered - len(self.newest)
        return self.newest[count - 1 - first] if first < count <= self.entered else None


def read(place: Path, status_of: StatusOf = lambda index: None) -> list[Position]:
    """The positions of all processes that have files in a folder.

    `status_of` is the exit status of a process, if it has ended and who started it knows: a
    signal's number is negative. Files that cannot be read are left out.
    """
    every = [_position(path, owner, status_of) for path, owner in files.files_in(place)]
    return sorted((p for p in every if p is not None), key=lambda p: (p.run, p.process))


def by_run(positions: Sequence[Position]) -> dict[str, list[Position]]:
    """The positions of each run."""
    return {run: [p for p in positions if p.run == run] for run in {p.run: 0 for p in positions}}


def _how_it_ended(status: int | None, ending: str) -> str | None:
    """The state of a process that has ended with a status, or with words of its own."""
    if status is None:
        return None if not ending else ENDED if ending == ENDED else FAILED
    by_another = status < 0 and status != -signal.SIGABRT  # XLA aborts those that lost another
    return GONE if by_another and not ending else FAILED if status else ENDED


def _position(path: Path, owner: Owner, status_of: StatusOf) -> Position | None:
    try:
        entered = _slowest(read_bytes(path, ROWS * KEPT * SLOT.size))
        programs = _programs(read_bytes(path.with_suffix(PROGRAMS), _LONGEST))
        state = files.state(owner)
        # Asked for afterwards: of a process that has ended by now it is known.
        status, words = status_of(owner.index), files.ending(path)
        state = _how_it_ended(status, words) or state
        error = words if state == FAILED else ""
        failed_at = path.with_suffix(ENDING).stat().st_mtime if error else math.inf
    except OSError:
        return None
    sites = tuple(_site(programs, entry) for _, _, entry in entered)
    count, seen = entered[-1][:2] if entered else (0, 0.0)
    name = owner.index, owner.host, owner.pid
    return Position(*name, state, count, seen, sites, failed_at, error, owner.run)


def _slowest(raw: bytes) -> list[tuple[int, float, int]]:
    """The slots of the device that has entered the fewest collectives, the newest last."""
    rows: list[list[tuple[int, float, int]]] = []
    for at, slot in enumerate(SLOT.iter_unpack(raw[: len(raw) // SLOT.size * SLOT.size])):
        if at % KEPT == 0:
            rows.append([])
        if slot[0] > 0 and (slot[0] - 1) % KEPT == at % KEPT:  # used, and not damaged
            rows[-1].append(slot)
    every = sorted(min(filter(None, rows), key=max, default=[]))
    gaps = [i for i in range(1, len(every)) if every[i][0] != every[i - 1][0] + 1]
    return every[gaps[-1] if gaps else 0 :]


def _programs(raw: bytes) -> dict[int, list[Site]]:
    """The collectives of programs by their keys; a line that is damaged is left out."""
    found: dict[int, list[Site]] = {}
    for line in raw.splitlines():
        with contextlib.suppress(*_DAMAGED):
            key, told = json.loads(line)
            found[key] = [
                Site(told["name"], number, each["kind"], each["source"], int(each.get("bytes", 0)))
                for number, each in enumerate(told["collectives"])
            ]
    return found


def _site(programs: Mapping[int, Sequence[Site]], entry: int) -> Site:
    program, number = entry >> 32, entry & 0xFFFFFFFF
    every = programs.get(program, ())
    name = every[0].program if every else "a program"
    return every[number] if number < len(every) else Site(name, number, "unknown", "unknown")


BEHIND, ELSEWHERE = "behind", "elsewhere"


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
    for how in (GONE, files.STOPPED):
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
