"""Who waits where, when processes are given up: what they kept of their positions.

Each process keeps the collective that it is at (`gshard.recording`): on CPUs unless GSHARD_RECORD
is 0, on GPUs with GSHARD_RECORD=1. Without it, the statuses say in which step each process is.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from gshard import recording
from gshard.mt.launch.status import Status

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
