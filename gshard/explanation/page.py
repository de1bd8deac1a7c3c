"""The explanation as one HTML file: the answer first, the source and the tensors, then the rest."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gshard.explanation.findings import EXPLAINED, ROUNDING, Findings, LineCost, describe
from gshard.explanation.names import LocalNames, einsums_of, shape
from gshard.explanation.why import near
from gshard.forecast import Forecast
from gshard.forecast.report import by_function, time_bars
from gshard.forecast.time import Timed
from gshard.graph.readable import duration, size
from gshard.graph.source import source_of
from gshard.pages import Chart, area, bars, checked, lines, render, style
from gshard.tensors.sharding import Sharding

_HERE = Path(__file__).parent
_AROUND = 6  # lines of source shown before and after one that does something
_OPEN = 2  # files whose source is unfolded
_VALUES = 36  # tensors shown
_CELLS = 64  # tiles shown along each dim of a grid

Number = Callable[[str], int]  # of a text in the list of texts


def page(findings: Findings, growth: Mapping[int, Forecast] | None = None) -> str:
    """The page; `growth` are forecasts of the same on other numbers of devices, for a plot."""
    forecast, subject = findings.forecast, findings.subject
    least = 0.005 * forecast.step_seconds  # a line of less has no card, unless it is the first
    costly = [cost for cost in findings.lines[:3] if cost.seconds >= least] or findings.lines[:1]
    return render(
        _HERE,
        "page.html",
        ("chart.js", "page.js"),
        title=f"{findings.name} on {findings.hardware}",
        style=style(_HERE.parent / "pages", "tokens.css", "page.css") + style(_HERE, "page.css"),
        data=checked(_data(findings)),
        about=f"{findings.name} on {findings.hardware}",
        bounds=findings.bounds,
        sentence=findings.sentence,
        facts=_facts(findings),
        costly=[_card(findings, cost) for cost in costly],
        files=_files(findings),
        devices=subject.num_devices,
        operators=f"{len(forecast.operators):,}",
        pipelines=[(str(pipe), pipe.schedule.cells) for pipe in forecast.pipelines],
        **_memory(findings),
        **_times(forecast, growth),
        chains=findings.chains,
        conflicts=findings.conflicts,
        replicated=[(what, size(held)) for what, held in findings.replicated],
        foot=_foot(forecast),
    )


def _facts(findings: Findings) -> list[tuple[str, str]]:
    forecast, subject = findings.forecast, findings.subject
    took, hidden = forecast.exposed_seconds, forecast.hidden_seconds
    share = took / (forecast.step_seconds or 1.0)
    beside = f"; {duration(hidden)} more is hidden" if hidden > ROUNDING else ""
    return [
        (size(subject.sent), "sent by each device"),
        (findings.counts, f"{duration(took)}, {share:.0%} of the step{beside}"),
        (duration(forecast.step_seconds), "per step"),
        (size(forecast.memory_bytes), f"at the peak, of {size(forecast.hardware.memory)}"),
    ]


def _card(findings: Findings, cost: LineCost) -> dict[str, Any]:
    found = findings.search()
    fix = found.for_line(cost.name, cost.sent)
    share = cost.seconds / (findings.forecast.step_seconds or 1.0)
    remark = f"None of {found.tried:,} changes of one annotation saves 1% of the bytes here."
    if found.tried < found.candidates:
        remark = (
            f"{found.tried:,} of {found.candidates:,} changes of one annotation were tried: "
            "explain(seconds=...) and gshard explain --budget try more."
        )
    return {
        "line": cost.name,
        "code": _code(cost.name),
        "sent": size(cost.sent),
        "seconds": cost.shown_seconds,
        "kinds": cost.kinds + (f" x {cost.runs:,}" if cost.runs > 1 else ""),
        "share": f"{share:.1%}",
        "percent": round(100 * min(share, 1.0), 1),
        "why": findings.why(cost),
        "remark": remark,
        "fix": fix
        and {
            "where": near(fix.source, cost.name),
            "change": fix.change,
            "saves": f"{size(fix.removed)} of {size(fix.before)}{fix.cost}",
        },
    }


def _code(source: str) -> str:
    name, _, line = source.rpartition(":")
    return linecache.getline(name, int(line)).strip() if line.isdigit() else ""


def _data(findings: Findings) -> dict[str, Any]:
    """What the page's script needs; texts that repeat are numbers of a list."""
    forecast = findings.forecast
    texts: dict[str, int] = {}

    def number(text: str) -> int:
        return texts.setdefault(text, len(texts))

    names = findings.local_names
    operators = [_operator(t, names, number) for t in forecast.operators]
    held = forecast.memory.peak - forecast.memory.temporary
    places = [number(line) for line in forecast.memory.lines]
    return {
        "devices": findings.subject.num_devices,
        "seconds": forecast.step_seconds,
        "operators": operators,
        "members": {
            n: [_member(member, number) for member in t.members]
            for n, t in enumerate(forecast.operators)
            if t.members
        },
        "memory": [held + b for b in forecast.memory.along],
        "memory_lines": places,
        "texts": list(texts),
        "why": {cost.name: findings.why(cost) for cost in findings.lines[:EXPLAINED]},
        "tensors": list(_tensors(findings)),
    }


def _operator(t: Timed, names: LocalNames, number: Number) -> list[float]:
    """In the order of FIELDS in page.js."""
    return [
        *_member(t, number),
        number(t.name),
        number(t.collective),
        t.count,
        t.group_size,
        number(t.bound),
        number(names.shape(t.value) if t.value is not None else t.shape),
        number(names.name(t.value)),
        number(" > ".join(t.loops)),
    ]


def _member(t: Timed, number: Number) -> list[float]:
    """What values of a combined collective have of their own: the first of FIELDS in page.js."""
    layers = [name for name in t.scope if not einsums_of([name])]
    return [
        float(f"{t.total_seconds:.4g}"),
        t.sent * t.count,
        number(t.source),
        number(by_function(t)),
        number("/".join(layers)),
        number(t.reason),
    ]


def _files(findings: Findings) -> list[dict[str, Any]]:
    """The lines of the user's files that do something, and those around them."""
    spent: dict[str, list[float]] = {}
    for t in findings.forecast.values:
        here = spent.setdefault(t.source, [0.0, 0])
        here[0] += float(t.total_seconds)
        here[1] += t.sent * t.count
    for eqn in findings.subject.annotations:
        spent.setdefault(source_of(eqn), [0.0, 0])
    wanted: dict[str, set[int]] = {}
    for source in spent:
        name, _, line = source.rpartition(":")
        if name and line.isdigit() and linecache.getlines(name):
            wanted.setdefault(name, set()).add(int(line))
    totals = {
        name: [sum(spent[f"{name}:{n}"][i] for n in numbers) for i in (0, 1)]
        for name, numbers in wanted.items()
    }
    ranked = sorted(wanted, key=lambda name: (-totals[name][1], -totals[name][0]))
    top = max((seconds for seconds, _ in spent.values()), default=0.0) or 1.0
    return [
        {
            "name": name,
            "open": place < _OPEN,
            "about": f"{duration(totals[name][0])}, {size(totals[name][1])} sent",
            "lines": list(_rows(name, wanted[name], spent, top)),
        }
        for place, name in enumerate(ranked)
    ]


def _rows(
    name: str, numbers: set[int], spent: Mapping[str, list[float]], top: float
) -> Iterator[dict[str, Any]]:
    text = linecache.getlines(name)
    shown = {m for n in numbers for m in range(n - _AROUND, n + _AROUND + 1)}
    last = 0
    for number in sorted(n for n in shown if 0 < n <= len(text)):
        if last and number > last + 1:
            yield {"gap": True}
        last = number
        place = f"{name}:{number}"
        seconds, sent = spent.get(place, (0.0, 0))
        yield {
            "gap": False,
            "number": number,
            "place": place,
            "runs": place in spent,
            "seconds": duration(seconds) if seconds else "",
            "sent": size(sent) if sent else "",
            "heat": round(100 * seconds / top),
            "text": text[number - 1].rstrip("\n"),
        }


def _memory(findings: Findings) -> dict[str, Any]:
    forecast, names = findings.forecast, findings.local_names
    memory = forecast.memory
    title = f"memory on a device, operator by operator, up to {size(memory.peak)}"
    room = "fits in" if forecast.fits else "does NOT fit in"
    return {
        "memory_chart": memory_chart(forecast, title).html("memory-chart"),
        "memory_about": f"{size(memory.peak)} at {memory.where or 'the start'}, {room} "
        f"{size(forecast.hardware.memory)}; {size(memory.arguments)} of it are arguments",
        "held": [
            {
                "size": size(h.bytes),
                "name": names.name(h.value),
                "shape": names.shape(h.value),
                "source": h.source,
            }
            for h in memory.held[:8]
        ],
    }


def memory_chart(forecast: Forecast, title: str) -> Chart:
    """Live memory at every operator; a rule shows what the device has, where that is near."""
    memory = forecast.memory
    held = memory.peak - memory.temporary
    unit, scale = _unit(memory.peak, (("GB", 1e9), ("MB", 1e6), ("KB", 1e3), ("B", 1.0)))
    along = [(held + b) / scale for b in memory.along]
    limit = forecast.hardware.memory / scale
    near_limit = limit if along and limit < 2 * max(along) else 0.0
    return area(title, along, f"{unit} on a device", "operators", near_limit)


def _times(forecast: Forecast, growth: Mapping[int, Forecast] | None) -> dict[str, Any]:
    parts = list(forecast.by(by_function).items())
    named = {(n.partition(" ")[2] or n).replace(".<locals>", ""): p for n, p in parts[:8]}
    chart = bars("time by function, and at the roofline", time_bars(named))
    found = {"time_chart": chart.html("time-chart"), "growth_chart": ""}
    found["time_about"] = f"{len(parts)} functions, {duration(forecast.step_seconds)} in all"
    if growth:
        found["growth_chart"] = growth_chart(growth).html("growth-chart")
    return found


def growth_chart(growth: Mapping[int, Forecast], title: str = "step time against devices") -> Chart:
    """The time of a step against the number of devices."""
    slowest = max(f.step_seconds for f in growth.values())
    unit, scale = _unit(slowest, (("seconds", 1.0), ("ms", 1e-3), ("us", 1e-6)))
    points = [(n, f.step_seconds / scale) for n, f in growth.items()]
    return lines(title, {"step": points}, "devices", unit, powers_of_two=True)


def _unit(value: float, units: tuple[tuple[str, float], ...]) -> tuple[str, float]:
    return next(((name, scale) for name, scale in units if value >= scale), units[-1])


def _foot(forecast: Forecast) -> str:
    planned = f", planned for {forecast.planned_for}" if forecast.planned_for else ""
    return (
        f"Times are a roofline for each operator on {forecast.devices} x "
        f"{forecast.hardware.name}, {forecast.topology.name}{planned}; one after the other. "
        "Written by gshard explain."
    )


def _tensors(findings: Findings) -> Iterator[dict[str, Any]]:
    """The annotated values and the largest arguments, each with its tiles."""
    subject, names = findings.subject, findings.names
    values: dict[Any, str] = {e.outvars[0]: source_of(e) for e in subject.annotations}
    arguments = sorted(subject.flat.jaxpr.invars, key=lambda v: -np.prod(v.aval.shape))
    for var in arguments[:_VALUES]:
        values.setdefault(var, "an argument")
    seen: set[Any] = set()
    for var, source in values.items():
        sharding = subject.sharding(var)
        name = names.value(var)
        key = (name, shape(var), sharding)
        if sharding is None or not sharding.splits or key in seen or len(seen) == _VALUES:
            continue
        seen.add(key)
        yield {
            "name": name,
            "shape": shape(var, names.dims(var)),
            "words": describe(sharding, names.dims(var)),
            "line": source,
            "cells": _cells(sharding),
        }


def _cells(sharding: Sharding) -> list[list[int]]:
    """The first device of each tile, as rows of the first split dim; -1 where all have it."""
    if sharding.is_replicated:
        return [[-1]]
    tiles = [n for n in sharding.tiles if n > 1]
    first = np.asarray(sharding.devices).reshape(int(np.prod(tiles)), -1)[:, 0]
    grid = first.reshape(tiles[0], -1) if len(tiles) > 1 else _folded(first)
    return grid[:_CELLS, :_CELLS].tolist()


def _folded(tiles: np.ndarray) -> np.ndarray:
    """One long row of tiles as several, if it is very long."""
    width = next((w for w in (32, 16, 8) if len(tiles) > 2 * w and len(tiles) % w == 0), len(tiles))
    return tiles.reshape(-1, width)
