"""Layouts with fewer annotations: what propagation finds by itself, or nearly, is left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from gshard.autosharding.candidates import Candidates
from gshard.autosharding.layout import Layout
from gshard.autosharding.layout.annotations import Group, groups

# By how much a layout may be slower than the best one to have fewer annotations.
TOLERANCE = 0.01


def most_seconds(least: float, bound: float) -> float:
    """The seconds that a layout with fewer annotations may take: a little more than the best one,
    and not so much more that a small gap to the bound is lost."""
    proven = bound / (1 - TOLERANCE)
    most = (1 + TOLERANCE) * least
    return min(most, proven) if proven >= least else most


def best_of(layouts: Sequence[Layout]) -> Layout:
    """Of layouts that are nearly as fast as the fastest, that with the fewest mesh axes, and with
    the fewest annotations inside."""
    least = min(layout.seconds for layout in layouts)
    equal = [layout for layout in layouts if layout.seconds <= least * (1 + TOLERANCE)]
    return min(equal, key=lambda a: (len(a.mesh), len(groups(a.inside)), a.seconds))


def smaller(
    best: Layout, most: float, candidates: Candidates, more_time: Callable[[], bool]
) -> Layout:
    """The layout with as few annotations as keep it at `most` seconds, and what each saves.

    Halves of the annotations inside the program are left out first, then halves of the halves.
    Where none is needed, those of arguments are tried, one group after the other; else arguments
    say best what the layout is.
    """
    search = _Search(best, most, candidates, more_time)
    search.without(groups(best.inside))
    for group in [] if search.best.inside else groups(best.annotations):
        search.without([group])
    return dataclasses.replace(search.best, considered=tuple(candidates.considered))


@dataclasses.dataclass
class _Search:
    best: Layout
    most: float
    candidates: Candidates
    more_time: Callable[[], bool]

    def without(self, chosen: Sequence[Group]) -> None:
        """Leave out as many of these as one can."""
        if not chosen or not self.more_time():
            return
        left_out = {a for group in chosen for a in group}
        best = self.best
        tried = self.candidates.priced(
            tuple(best.mesh.values()),
            tuple(a for a in best.annotations if a not in left_out),
            tuple(a for a in best.inside if a not in left_out),
        )
        if tried.seconds <= self.most and tried.memory_bytes <= self.candidates.limit:
            self.best = tried
        elif len(chosen) == 1:
            self._saves(chosen[0], max(0.0, tried.seconds - best.seconds))
        else:
            middle = len(chosen) // 2
            self.without(chosen[:middle])
            self.without(chosen[middle:])

    def _saves(self, group: Group, seconds: float) -> None:
        """Note what a group saves."""

        def noted(annotations: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(
                dataclasses.replace(a, saves=seconds) if a in group else a for a in annotations
            )

        best = self.best
        self.best = dataclasses.replace(
            best, annotations=noted(best.annotations), inside=noted(best.inside)
        )
