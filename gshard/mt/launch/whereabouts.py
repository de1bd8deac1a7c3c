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
    scratch: Path, status_of: recording.StatusOf = lambda index: None
) -> tuple[int, str] | None:
    """Which process holds the others up, and all of it in words; None if that is not known."""
    found = recording.standstill(recording.read(scratch / _FOLDER, status_of))
    if found is None or not found.culprits:
        return None
    return found.culprits[0].process, str(found)


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
