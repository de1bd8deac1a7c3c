"""Plots of a forecast as SVG, drawn without any library so that the page needs nothing else."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence

from gshard.forecast import Forecast
from gshard.forecast.collective import collective_seconds
from gshard.forecast.report import by_function, duration, size

_WIDTH, _HEIGHT = 460, 230
_LEFT, _TOP, _BOTTOM = 62, 26, 30
_COLOURS = ("#4a7fb5", "#d9730d", "#5a9e6f", "#8a63b0")
_DATA = 8 * 2**20  # bytes of the collectives that are compared, as in the paper's figure


def charts(forecast: Forecast, growth: Mapping[int, Forecast] | None = None) -> list[str]:
    """Memory, the breakdown against the roofline, collectives, and the step, against devices.

    `growth` are forecasts on other numbers of devices: without them there is no fourth plot.
    """
    found = [_memory(forecast), _breakdown(forecast), _collectives(forecast)]
    if growth:
        steps = {"step": [f.step_seconds for f in growth.values()]}
        found.append(_lines("step time against devices", list(growth), steps, log=False))
    return found


def _memory(forecast: Forecast) -> str:
    memory = forecast.memory
    parts = {
        "arguments": memory.arguments,
        "results besides": memory.results - memory.donated,
        "temporary": memory.temporary,
        "the device has": forecast.hardware.memory,
    }
    return _bars("memory per device", {n: [b] for n, b in parts.items()}, size)


def _breakdown(forecast: Forecast) -> str:
    parts = list(forecast.by(by_function).items())[:7]
    rows = {n.partition(" ")[2] or n: [p.seconds, p.roofline_seconds] for n, p in parts}
    return _bars("time by function, and at the roofline", rows, duration)


def _collectives(forecast: Forecast) -> str:
    counts = [2**n for n in range(2, 12)]
    machine = forecast.hardware
    times = {
        kind: [collective_seconds(machine.topology(d), kind, _DATA) for d in counts]
        for kind in ("all_reduce", "all_to_all", "all_gather")
    }
    return _lines(f"{size(_DATA)} collectives against devices, {machine.name}", counts, times)


def _bars(title: str, rows: Mapping[str, Sequence[float]], said: Callable[[float], str]) -> str:
    """Horizontal bars, one group a row, each with its value."""
    top = max((v for values in rows.values() for v in values), default=1.0) or 1.0
    step = (_HEIGHT - _TOP) / max(len(rows), 1)
    shapes = []
    for number, (name, values) in enumerate(rows.items()):
        y = _TOP + number * step
        shapes.append(_text(150, y + step / 2 + 4, name[-24:], "end"))
        thick = (step - 4) / len(values)
        for place, value in enumerate(values):
            wide = 220 * value / top
            at = y + 2 + place * thick
            shapes.append(
                f'<rect x="156" y="{at:.1f}" width="{wide:.1f}" height="{thick:.1f}" '
                f'fill="{_COLOURS[place]}"/>'
            )
            shapes.append(_text(160 + wide, at + thick / 2 + 4, said(value)))
    return _svg(title, shapes)


def _lines(
    title: str, xs: Sequence[int], series: Mapping[str, Sequence[float]], log: bool = True
) -> str:
    """Lines over a logarithmic count of devices."""
    values = [v for ys in series.values() for v in ys if v > 0]
    low, high = (min(values), max(values)) if log else (0.0, 1.1 * max(values))
    shapes = [_text(_LEFT - 4, _TOP + 8, duration(high), "end")]
    shapes.append(_text(_LEFT - 4, _HEIGHT - _BOTTOM, duration(low) if low else "0", "end"))

    def place(x: int, y: float) -> tuple[float, float]:
        across = math.log(x / xs[0]) / (math.log(xs[-1] / xs[0]) or 1.0)
        up = math.log(y / low) / (math.log(high / low) or 1.0) if log else y / high
        wide, tall = _WIDTH - _LEFT - 20, _HEIGHT - _TOP - _BOTTOM
        return _LEFT + across * wide, _HEIGHT - _BOTTOM - up * tall

    for number, (name, ys) in enumerate(series.items()):
        points = [place(x, y) for x, y in zip(xs, ys, strict=True) if y > 0]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        colour = _COLOURS[number]
        shapes.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        shapes += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        shapes.append(_text(_LEFT + 8, _TOP + 12 + 15 * number, name, colour=colour))
    for x in xs[:: max(1, len(xs) // 5)]:
        shapes.append(_text(place(x, high)[0], _HEIGHT - _BOTTOM + 16, str(x), "middle"))
    return _svg(title, shapes)


def _text(x: float, y: float, words: str, anchor: str = "start", colour: str = "") -> str:
    fill = colour or "currentColor"
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}">'
        f"{html.escape(words)}</text>"
    )


def _svg(title: str, shapes: Sequence[str]) -> str:
    head = f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">'
    return "".join([head, f'<g font-size="11">{_text(0, 12, title)}', *shapes, "</g></svg>"])
