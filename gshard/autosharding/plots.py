"""The frontier of memory and time, as a chart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gshard.pages import lines

_GB = 1e9
_CHOSEN, _FRONTIER, _OTHERS = "chosen", "the least time for the memory", "other layouts"


def plot(layout: Any, path: Path) -> Path:
    """Milliseconds of a step against gigabytes on each device, of all layouts that were lowered."""
    if not layout.considered:
        raise ValueError("a layout that was loaded has no frontier: search again with gshard.auto")
    frontier = [(c.memory_bytes / _GB, 1e3 * c.seconds) for c in layout.frontier]
    every = {(c.memory_bytes / _GB, 1e3 * c.seconds) for c in layout.considered}
    others = sorted(every - set(frontier))
    own = (layout.memory_bytes / _GB, 1e3 * layout.seconds)
    marks = [(_FRONTIER, *point) for point in frontier]
    marks += [(_CHOSEN, *own), *((_OTHERS, *point) for point in others)]
    # Points without a line, each kind with its name at the last one.
    curves = {_FRONTIER: frontier, _CHOSEN: [own], _OTHERS: others[-1:]}
    limit = f" (limit {layout.limit / _GB:.3g} GB)" if layout.limit else ""
    chart = lines(
        "What less memory costs",
        curves,
        f"GB on each device{limit}",
        "ms a step",
        marks=marks,
    )
    return chart.save(path)
