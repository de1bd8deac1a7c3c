"""Where each process is in its program: which collective it entered last, in a file beside it.

With the environment variable GSHARD_RECORD, every collective of a partitioned program is preceded
by a mark, which is written to a file: whoever reads the file from outside sees it even if the
process hangs, is stopped or has been killed. A file has a row of slots for each of the process's
devices, with the newest collectives that it entered. A second file says what their numbers mean,
and a third one how the process ended, if it could say so: one that was killed could not, those that
fail because it is gone can. `python -m gshard.recording FOLDER` reads the files of all processes
and says who waits where, and for whom.

The folder has to be this user's own. A file is named after the run, the process and when it was
started, so that runs share a folder and a number that another process has by now deceives nobody.
Recording never ends a run: what cannot be written is reported once, and nothing more is recorded.
(A mapped file would be faster to write, but a process dies of SIGBUS when one is cut.)
"""

from __future__ import annotations

from gshard.recording.files import ENDED, FAILED, GONE, KEPT, RUNNING, STOPPED
from gshard.recording.reading import (
    BEHIND,
    ELSEWHERE,
    Position,
    Site,
    Standstill,
    StatusOf,
    by_run,
    read,
    standstill,
)
from gshard.recording.writing import LAUNCHED, VARIABLE, Recorder, enter, folder, recorder

__all__ = [
    "BEHIND", "ELSEWHERE", "ENDED", "FAILED", "GONE", "KEPT", "LAUNCHED", "RUNNING", "STOPPED",
    "VARIABLE", "Position", "Recorder", "Site", "Standstill", "StatusOf", "by_run", "enter",
    "folder", "read", "recorder", "standstill",
]  # fmt: skip
