"""Charts over two numeric axes: lines, points, bands and rules, by Vega-Lite."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gshard.pages.charts import LETTER, WIDTHS, Chart, draw
from gshard.pages.template import written

_HEIGHT = 230
_LEFT = 56  # pixels for the labels of the y axis
_ALL = {"tickCount": 100, "format": ".12~g"}  # a logarithmic axis leaves labels out otherwise
_LONGEST = 24  # letters of a name beside its line
_SHORT = "replace(format(datum.value, '.3~s'), 'G', 'B')"  # 12k, 3.4M, 600B
Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """Points of one colour, as a line or as dots, and the name at their end."""

    points: Sequence[Point]
    name: str = ""
    colour: str = "var(--s0)"
    line: bool = True
    dots: float = 0.0  # the area of a dot, in square pixels
    faint: bool = False
    dashed: bool = False
    filled: bool = False  # each value up to the next point, and what is below it


@dataclass(frozen=True)
class ChartAxis:
    """A numeric axis: by default as long as its values need, the y axis from zero."""

    title: str = ""
    low: float | None = None
    high: float | None = None
    log: bool = False
    zero: bool = False
    ticks: Sequence[float] = ()
    labels: Sequence[str] = ()  # instead of the numbers `first`, `first` + 1, ...
    first: int = 0
    form: str = ""  # as d3-format; "short" for 12k and 3.4M

    def ends(self, values: Sequence[float]) -> tuple[float, float]:
        """Where the axis begins and ends."""
        low = min(values, default=1.0) if self.low is None else self.low
        high = max(values, default=1.0) if self.high is None else self.high
        if self.zero:
            low, high = min(0.0, low), max(0.0, high)
        if low < high:
            return low, high
        return (low / 2, low * 2) if self.log else (low - 0.5, low + 0.5)


def curves(
    title: str,
    series: Sequence[Series],
    x: ChartAxis,
    y: ChartAxis,
    height: int = _HEIGHT,
    bands: Sequence[tuple[float, float, str]] = (),
    widths: Sequence[str] = ("wide", "narrow"),
) -> Chart:
    """The series in order, later ones above earlier ones; `bands` are named parts of the x axis.

    Values of zero and below are left out on logarithmic axes; what is beyond the ends of the y
    axis is cut off.
    """
    known = [_within(each, x, y) for each in series]
    known = [each for each in known if each.points]
    across = x.ends([a for each in known for a, _ in each.points])
    up = y.ends([b for each in known for _, b in each.points])
    named = [each for each in known if each.name]
    layers = [*_bands(bands), *(_base(up) if y.zero else ())]
    layers += [layer for each in known for layer in _marks(each, up)]
    room = {"top": (22 if bands else 0) + (26 if y.title else 12), "bottom": 40 if x.title else 24}
    longest = max((len(_shortened(each.name)) for each in named), default=0)
    specs: dict[str, dict[str, Any]] = {}
    for width in widths:
        ends = _names(named, up, y.log, height) if width == "wide" else []
        right = 16 + round(LETTER * 1.15 * longest) if ends else 16
        encoding = {"x": _axis("x", x, across), "y": _axis("y", y, up)}
        encoding["x"]["axis"] |= _labels(x, WIDTHS[width] - _LEFT - right)
        if bands:
            encoding["y"]["axis"]["titleY"] = -26  # above the names of the bands
        spec = {
            "data": {"values": []},
            "layer": [*layers, *ends] or [{"mark": "point"}],
            "encoding": encoding,
        }
        specs |= draw(title, spec, height, _LEFT, right, widths=[width], **room).specs
    legend = [(each.name, each.colour) for each in named] if len(named) > 1 else []
    return Chart(title, specs, (*across, x.log), legend)


def _within(series: Series, x: ChartAxis, y: ChartAxis) -> Series:
    points = [(a, b) for a, b in series.points if (a > 0 or not x.log) and (b > 0 or not y.log)]
    return Series(**{**vars(series), "points": points})


def _marks(series: Series, up: Point) -> list[dict[str, Any]]:
    points = [{"x": a, "y": b} for a, b in series.points]
    found: list[dict[str, Any]] = []
    if series.filled:
        outline = {"color": series.colour, "strokeWidth": 1.5}
        below = {"type": "area", "interpolate": "step-after", "opacity": 0.35, "line": outline}
        return [{"data": {"values": points}, "mark": {**below, "color": series.colour}}]
    if series.line and len(points) > 1:
        line: dict[str, Any] = {"type": "line", "color": series.colour}
        line["strokeWidth"] = 1 if series.faint else 2
        line |= {"opacity": 0.3} if series.faint else {}
        line |= {"strokeDash": [5, 4]} if series.dashed else {}
        beyond = any(not up[0] <= b <= up[1] for _, b in series.points)
        found.append({"data": {"values": points}, "mark": {**line, "clip": beyond}})
    if series.dots or not found:
        dot: dict[str, Any] = {"type": "circle", "size": series.dots or 24, "color": series.colour}
        dot["opacity"] = 0.45 if series.faint else 1.0
        inside = [point for point in points if up[0] <= point["y"] <= up[1]]
        found.append({"data": {"values": inside}, "mark": dot})
    return found


def _bands(bands: Sequence[tuple[float, float, str]]) -> list[dict[str, Any]]:
    """Every second band shaded, and a name above each."""
    if not bands:
        return []
    shaded = {"values": [{"from": a, "to": b} for a, b, _ in bands[1::2]]}
    middle = {"values": [{"x": (a + b) / 2, "text": name} for a, b, name in bands]}
    span = {"x": {"field": "from", "type": "quantitative"}, "x2": {"field": "to"}, "y": None}
    place = {"y": {"value": -8}, "text": {"field": "text"}}
    shading = {"type": "rect", "color": "var(--band)"}
    return [
        {"data": shaded, "mark": shading, "encoding": span},
        {"data": middle, "mark": {"type": "text", "baseline": "bottom"}, "encoding": place},
    ]


def _base(up: Point) -> list[dict[str, Any]]:
    """A line at zero, where the y axis has values on both sides of it."""
    if up[0] >= 0:
        return []
    rule = {"type": "rule", "color": "var(--faint)"}
    return [{"data": {"values": [{"y": 0}]}, "mark": rule, "encoding": {"x": None}}]


def _names(named: Sequence[Series], up: Point, log: bool, height: int) -> list[dict[str, Any]]:
    """The names at the ends of lines, those that would overlap moved upwards."""
    curve, back = (math.log, math.exp) if log else (float, float)
    line = 14 / height * (curve(up[1]) - curve(up[0]))  # the height of a name
    found: list[dict[str, Any]] = []
    floor = curve(up[0]) - line
    for each in sorted(named, key=lambda each: each.points[-1][1]):
        x, y = each.points[-1]
        floor = max(curve(y), floor + line)
        text = {"type": "text", "align": "left", "dx": 8, "fontWeight": 600, "color": each.colour}
        data = {"values": [{"x": x, "y": back(floor), "name": _shortened(each.name)}]}
        found.append({"data": data, "mark": text, "encoding": {"text": {"field": "name"}}})
    return found


def _shortened(name: str) -> str:
    return name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…"


def _axis(field: str, axis: ChartAxis, ends: Point) -> dict[str, Any]:
    scale: dict[str, Any] = {"domain": list(ends), "nice": False, "zero": False}
    if field == "y" and axis.high is None and not axis.log:
        scale["nice"] = True
    side = {"titleAngle": 0, "titleY": -10, "titleX": 0} if field == "y" else {"grid": False}
    shown: dict[str, Any] = {"title": axis.title or None, "tickCount": 5, **side}
    if axis.log:
        scale["type"] = "log"
        shown |= {"values": list(axis.ticks) or decades(*ends), **_ALL}
    if axis.form == "short":
        shown["labelExpr"] = _SHORT
    elif axis.form:
        shown |= {"format": axis.form, **({"tickMinStep": 1} if axis.form == "d" else {})}
    if field == "x":
        shown |= {"labelFlush": False, "labelOverlap": "parity"}
    return {"field": field, "type": "quantitative", "scale": scale, "axis": shown}


def _labels(axis: ChartAxis, width: int) -> dict[str, Any]:
    """As many of the labels as there is room for, evenly spread."""
    if not axis.labels:
        return {}
    longest = LETTER * max(map(len, axis.labels)) + 8
    by = math.ceil(len(axis.labels) * longest / max(width, 1))
    values = list(range(axis.first, axis.first + len(axis.labels), by))
    names = json.dumps(written(axis.labels))
    text = f"{names}[datum.value - {axis.first}]"
    # Vega leaves values out where there are more than `tickCount`.
    return {"values": values, "tickCount": len(values), "labelExpr": text, "labelOverlap": False}


def decades(low: float, high: float) -> list[float]:
    """1, 2 and 5 times the powers of ten within the ends; 1 alone where that is enough."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1,) if high > 3000 * low else (1, 2, 5)
    found = [s * 10.0**p for p in powers for s in steps if low <= s * 10.0**p <= high]
    return found or [low, high]


def lines(
    title: str,
    series: Mapping[str, Sequence[Point]],
    x: str,
    y: str,
    powers_of_two: bool = False,
    log: bool = False,
    marks: Sequence[tuple[str, float, float]] = (),
) -> Chart:
    """Lines, each with its name at its end: over powers of two, or on two logarithmic axes.

    Points are marked at `marks` of a series, or else all of them.
    """
    found = []
    for n, (name, points) in enumerate(series.items()):
        colour, shown = f"var(--s{n % 12})", name if len(series) > 1 else ""
        dots = 0.0 if marks else 36.0
        found.append(Series(points, shown, colour, dots=dots))
        marked = [(a, b) for each, a, b in marks if each == name]
        found.append(Series(marked, colour=colour, line=False, dots=36.0))
    ticks = sorted({a for points in series.values() for a, _ in points}) if powers_of_two else ()
    across = ChartAxis(x, log=log or powers_of_two, ticks=ticks)
    return curves(title, found, across, ChartAxis(y, log=log, zero=not log))


def area(title: str, values: Sequence[float], unit: str, x: str, limit: float = 0.0) -> Chart:
    """A filled curve over the places of `values`, its peak marked; a dashed line at `limit`."""
    number = max(len(values), 1)
    found = [Series(list(enumerate([*values, *values[-1:]])), filled=True)]
    if limit:
        ends = [(0.0, limit), (float(number), limit)]
        found.append(Series(ends, colour="var(--s1)", dashed=True))
    if values:
        peak = max(range(len(values)), key=lambda n: values[n])
        top = (peak + 0.5, values[peak])
        found.append(Series([top], colour="var(--s1)", line=False, dots=60.0))
    across = ChartAxis(x, low=0.0, high=float(number))
    return Chart(title, curves(title, found, across, ChartAxis(unit, zero=True), height=190).specs)
