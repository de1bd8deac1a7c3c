"""A layout in words and as a chart: what it is, what else was considered, what its time goes to."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gshard.autosharding.layout.annotations import Annotated, Group, groups, names_of
from gshard.autosharding.traced import STANDING
from gshard.forecast.report import Forecast
from gshard.graph.readable import counted, duration, size, table
from gshard.pages import ChartAxis, Series, curves

_MOST = 5  # rows of each list


@dataclasses.dataclass(frozen=True)
class Considered:
    """A layout that was lowered, and the forecast of its program."""

    name: str
    seconds: float
    memory_bytes: int
    fits: bool
    communication_seconds: float
    sent_bytes: int

    @staticmethod
    def of(name: str, forecast: Forecast, limit: int) -> Considered:
        """What is kept of a forecast."""
        return Considered(
            name,
            forecast.serial_seconds,  # the model does not count overlap either
            forecast.memory_bytes,
            forecast.memory_bytes <= limit,
            forecast.exposed_seconds + forecast.hidden_seconds,
            forecast.sent_bytes,
        )

    def with_more(self, forecast: Forecast, layers: int, memory: int, limit: int) -> Considered:
        """With `layers` more layers like the one that represents them, in `memory` bytes."""
        one = [t for t in forecast.values if STANDING in t.scope]
        sends = sum(t.alone_seconds * t.count for t in one if t.collective)
        return dataclasses.replace(
            self,
            seconds=self.seconds + layers * sum(t.alone_seconds * t.count for t in one),
            memory_bytes=self.memory_bytes + memory,
            fits=self.memory_bytes + memory <= limit,
            communication_seconds=self.communication_seconds + layers * sends,
            sent_bytes=self.sent_bytes + layers * sum(t.sent * t.count for t in one),
        )


def summary(layout: Any) -> str:
    """The mesh, the figures, and the annotations with what each saves: those of tensors of one
    shape that are sharded alike in one line, as of equal layers."""
    mesh = " x ".join(f"{name}={n}" for name, n in layout.mesh.items())
    mesh += f", pipelines in {counted(layout.stages, 'stage')}" if layout.stages else ""
    lines = [
        f"mesh {mesh} on {layout.devices} x {layout.hardware}",
        f"forecast: {duration(layout.seconds)} per step, {size(layout.memory_bytes)} per device",
        f"no layout takes less than {duration(layout.bound)} (gap {100 * layout.gap:.1f}%)",
    ]
    found = [*groups(layout.annotations), *groups(layout.inside)]
    names = names_of(layout)
    lines += [_line(group, names) for group in found] or ["  no annotations"]
    if layout.layers:
        lines.append(f"  decided for one of {layout.layers} equal layers, and used for all")
    if layout.results:
        lines.append(f"  {counted(len(layout.results), 'result')} sharded as the argument replaced")
    return "\n".join(lines)


def as_table(layout: Any) -> str:
    """The same for notebooks: the figures, and a table of the annotations of arguments."""
    rank = max((len(a.dims) for a in layout.annotations), default=0)
    rows = [
        (
            a.path,
            "x".join(map(str, a.shape)),
            *("+".join(axes) or "-" for axes in a.dims),
            *[""] * (rank - len(a.dims)),
        )
        for a in layout.annotations
    ]
    heading = "<br>".join(map(html.escape, summary(layout).splitlines()[:3]))
    heads = ("argument", "shape", *(f"dim {d}" for d in range(rank)))
    return f"<p>{heading}</p>" + (table(heads, rows) if rows else "")


def _line(group: Group, names: Mapping[str, str]) -> str:
    """One line for annotations that are alike."""
    first = group[0]
    if isinstance(first, Annotated):
        first = dataclasses.replace(first, name=names.get(first.path, first.name))
    more = f", and {len(group) - 1} more like it" if len(group) > 1 else ""
    saves = f", saves {duration(first.saves)}" if first.saves > 0 else ""
    return f"  {first}{more}{saves}"


def explained(layout: Any) -> str:
    """The summary, what was considered, why the runner-up lost, and the limits that bind."""
    lines = [summary(layout)]
    if layout.meshes:
        looked_at = ", ".join(" x ".join(map(str, mesh)) for mesh in layout.meshes)
        lines.append(f"meshes looked at: {looked_at}")
    if layout.phases:
        lines.append("work of the search, in seconds of those given:")
        lines += [
            f"  {name}: {took:.1f} of {given:.1f}" for name, (took, given) in layout.phases.items()
        ]
    if layout.considered:
        lines += ["considered:", *_considered(layout), *_runner_up(layout)]
        lines.append("frontier: less memory takes longer")
        lines += [f"  {size(c.memory_bytes)}: {duration(c.seconds)}" for c in layout.frontier]
    if layout.lowered is not None:
        forecast = layout.lowered.forecast(layout.keywords["hardware"])
        lines += ["limits:", *_binding(layout, forecast)]
    return "\n".join(lines)


def _considered(layout: Any) -> list[str]:
    ordered = sorted(layout.considered, key=lambda c: c.seconds)
    lines = []
    for each in ordered[:_MOST]:
        against = each.seconds / layout.seconds - 1
        fits = "" if each.fits else ", too much memory"
        lines.append(
            f"  {each.name}: {duration(each.seconds)} ({100 * against:+.1f}%), "
            f"{size(each.memory_bytes)}{fits}"
        )
    more = len(ordered) - _MOST
    return lines + ([f"  and {more} more, all slower"] if more > 0 else [])


def _runner_up(layout: Any) -> list[str]:
    """Why the best of the layouts that are not this one lost."""
    own = [c for c in layout.considered if c.seconds == layout.seconds]
    others = [c for c in layout.considered if c.seconds > layout.seconds and c.fits]
    if not own or not others:
        return []
    chosen, other = own[0], min(others, key=lambda c: c.seconds)
    sends = other.communication_seconds - chosen.communication_seconds
    works = (other.seconds - other.communication_seconds) - (
        chosen.seconds - chosen.communication_seconds
    )

    def more(seconds: float) -> str:
        if not seconds:
            return "no more"
        return f"{duration(abs(seconds))} {'more' if seconds > 0 else 'less'}"

    return [
        f"the runner-up, {other.name}, takes {more(other.seconds - chosen.seconds)}: "
        f"{more(sends)} for communication, {more(works)} for work"
    ]


def _binding(layout: Any, forecast: Forecast) -> list[str]:
    lines = []
    collectives = sorted(
        (o for o in forecast.operators if o.collective), key=lambda o: -o.total_seconds
    )
    for each in collectives[:_MOST]:
        if each.total_seconds > 0.01 * layout.seconds:
            lines.append(
                f"  links: {each.collective} at {each.source}, {duration(each.total_seconds)}"
            )
    faster = [c for c in layout.considered if not c.fits and c.seconds < layout.seconds]
    if faster:
        best = min(faster, key=lambda c: c.seconds)
        lines.append(
            f"  memory: {best.name} would take {duration(best.seconds)}, but holds "
            f"{size(best.memory_bytes - layout.limit)} too much"
        )
    where = forecast.memory.where
    at = f" at {where}" if where else ""
    lines.append(f"  memory: the peak is {size(layout.memory_bytes)}{at}")
    return lines


def plot(layout: Any, path: Path) -> Path:
    """Milliseconds of a step against gigabytes on each device, of all layouts that were lowered."""
    if not layout.considered:
        raise ValueError("a layout that was loaded has no frontier: search again with gshard.auto")

    def point(each: Any) -> tuple[float, float]:
        return each.memory_bytes / 1e9, 1e3 * each.seconds

    frontier, every = [*map(point, layout.frontier)], {*map(point, layout.considered)}
    widest, slowest = (1.5 * max(ends) for ends in zip(*frontier, strict=True))  # of the plot
    others = sorted((a, b) for a, b in every - {*frontier} if a <= widest and b <= slowest)
    left_out = len(every) - len(frontier) - len(others)
    more = f"; {left_out} beyond the axes" if left_out > 0 else ""
    limit = f" (limit {layout.limit / 1e9:.3g} GB)" if layout.limit else ""
    chart = curves(
        f"Step time and memory: {len(every)} layouts{more}",
        [
            Series(others, colour="var(--s6)", line=False, dots=30.0, faint=True),
            Series(frontier, "frontier", dots=40.0),
            Series([point(layout)], "chosen", "var(--s1)", line=False, dots=110.0),
        ],
        ChartAxis(f"GB on each device{limit}"),
        ChartAxis("ms per step"),
    )
    return chart.save(path)
