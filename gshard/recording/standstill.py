"""Who holds the others up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gshard.recording.files import FAILED, GONE, STOPPED
from gshard.recording.reading import Position, Site

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
