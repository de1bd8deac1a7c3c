"""The time that a search has: work that is counted, with a limit of wall time around it.

A search that is ended by the clock ends elsewhere on a busy machine than on a free one. Where work
is counted, in seconds that it takes on a core of an ordinary machine, equal inputs have equal
answers, as long as the wall time suffices for the work.
"""

from __future__ import annotations

import math
import time


class Clock:
    """Time that passes as work is done (`counted`, the seconds of work that may be done), or as it
    does on the wall."""

    def __init__(self, seconds: float, counted: float | None = None) -> None:
        self.wall = time.monotonic() + seconds
        self.counted = counted
        self.done = 0.0

    @property
    def left(self) -> float:
        """Seconds that are left, of work where that is counted."""
        return self.wall_left if self.counted is None else self.counted - self.now()

    @property
    def wall_left(self) -> float:
        """Seconds of wall time that are left."""
        return self.wall - time.monotonic()

    def now(self) -> float:
        """What to measure durations by; infinite when counted work has run out of wall time."""
        if self.counted is None:
            return time.monotonic()
        return self.done if self.wall_left > 0 else math.inf

    def charge(self, seconds: float) -> None:
        """Count work."""
        self.done += seconds

    def extend(self, seconds: float) -> None:
        """Have at least so many seconds of wall time from now on."""
        self.wall = max(self.wall, time.monotonic() + seconds)
