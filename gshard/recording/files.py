"""The files of processes: their names, and whether their processes still run."""

from __future__ import annotations

import contextlib
import re
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from gshard.untrusted import printable, read_bytes

KEPT = 256  # the newest collectives of a device
ROWS = 64  # devices of a process, at most
SLOT = struct.Struct("=qdQ")  # the count with this collective, when it was entered, and which it is
POSITION, PROGRAMS, ENDING = ".position", ".programs", ".ending"
RUNNING, STOPPED, GONE = "running", "stopped", "gone"  # gone: it was killed
FAILED, ENDED = "failed", "ended"  # with an error; without one
_WORDS = 4096  # bytes of an error that are read


@dataclass(frozen=True)
class Owner:
    """The process that a file is of: its number on its host, and the clock when it was started."""

    run: str
    index: int
    host: str
    pid: int
    begun: int  # 0 if the system does not say

    def __str__(self) -> str:
        return f"{self.run}-{self.index}-{self.host}-{self.pid}-{self.begun}"


_NAMED = re.compile(r"(\w+)-(\d{1,9})-([\w.-]+)-(\d{1,9})-(\d{1,20})\.position", re.ASCII)


def files_in(place: Path) -> list[tuple[Path, Owner]]:
    """The files with positions in a folder; others may be there too."""
    try:
        every = [(path, _NAMED.fullmatch(path.name)) for path in sorted(place.iterdir())]
    except OSError:
        return []
    return [(path, Owner(m[1], int(m[2]), m[3], int(m[4]), int(m[5]))) for path, m in every if m]


def sweep(place: Path, mine: Owner) -> None:
    """Remove the files of runs that have ended, as far as this host knows."""
    here = [(path, o) for path, o in files_in(place) if o.host == mine.host and o.run != mine.run]
    alive = {owner.run for _, owner in here if state(owner) != GONE}
    for path, owner in here:
        if owner.run not in alive:
            remove(path)


def ending(position: Path) -> str:
    """The error or exit status that a process left when it ended; none if it runs or was killed."""
    try:
        words = read_bytes(position.with_suffix(ENDING), _WORDS).decode(errors="replace")
    except OSError:
        return ""
    return printable(words.partition("\n")[0])


def remove(position: Path) -> None:
    """Remove all files of a process."""
    for suffix in (POSITION, PROGRAMS, ENDING):
        with contextlib.suppress(OSError):
            position.with_suffix(suffix).unlink()


def looked_at(pid: int) -> tuple[str, int]:
    """The state of a process of this host as a letter, and when it was started; "" if none is."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, IndexError, ValueError):
        return "", 0


def state(owner: Owner) -> str:
    """Whether a process runs; those of other hosts do, as far as this one knows."""
    if owner.host != socket.gethostname() or not Path("/proc/self").exists():
        return RUNNING
    letter, begun = looked_at(owner.pid)
    if begun != owner.begun:  # another process has its number
        return GONE
    return {"T": STOPPED, "t": STOPPED, "Z": GONE, "X": GONE}.get(letter, RUNNING)
