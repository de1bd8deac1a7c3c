"""Better layouts by changing one argument at a time: the forecast sees what the model does not."""

from __future__ import annotations

import math
from collections.abc import Callable

from gshard.autosharding.candidates import Candidates
from gshard.autosharding.cost.specs import NONE, specs_of
from gshard.autosharding.layout import Layout
from gshard.autosharding.layout.annotations import Annotated, dims_of

_BETTER = 1e-3  # share of the time below which a layout is not worth another round


def polished(best: Layout, candidates: Candidates, more_time: Callable[[], bool]) -> list[Layout]:
    """Layouts each better than the one before: the sharding of one argument is changed, then that
    of the next, the largest first, until no change helps or time runs out."""
    found: list[Layout] = []
    mesh = tuple(best.mesh.values())
    shapes = sorted(candidates.subject.paths, key=lambda p: -math.prod(p[1]))
    tried = {_key(best.annotations)}
    improved = True
    while improved:
        improved = False
        for path, shape in shapes:
            for spec in specs_of(shape, mesh) if shape else ():
                annotations = _with(best.annotations, path, shape, spec)
                if not more_time():
                    return found
                if _key(annotations) in tried:
                    continue
                tried.add(_key(annotations))
                layout = candidates.priced(mesh, annotations, best.inside)
                fits = layout.memory_bytes <= candidates.limit
                if fits and layout.seconds < (1 - _BETTER) * best.seconds:
                    best, improved = layout, True
                    found.append(layout)
    return found


def _key(annotations: tuple[Annotated, ...]) -> frozenset[Annotated]:
    return frozenset(annotations)


def _with(
    annotations: tuple[Annotated, ...], path: str, shape: tuple[int, ...], spec: tuple[int, ...]
) -> tuple[Annotated, ...]:
    others = tuple(a for a in annotations if a.path != path)
    if all(at == NONE for at in spec):
        return others
    return (*others, Annotated(path, shape, dims_of(spec, len(shape))))
