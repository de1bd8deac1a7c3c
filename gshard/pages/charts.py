"""Charts by Vega-Lite, drawn when a page is made: SVG in the page's colours, light and dark.

Colours are the page's CSS variables (`tokens.css`), so a chart follows the reader's theme without
a script. Each is drawn for wide and for narrow screens. Where the axes are in the picture is known,
so that `chart.js` can show what is under the pointer.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gshard.pages.template import EXTRA, markup

_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"  # a name; nothing is asked for there
_WIDTHS = {"wide": 860, "narrow": 350}
_FONT = "system-ui, -apple-system, Segoe UI, Roboto, Noto Sans, DejaVu Sans, sans-serif"
_HEIGHT = 230  # of lines
_ALL = {"tickCount": 100, "format": ".12~g"}  # a logarithmic axis leaves labels out otherwise
_LETTER = 6.6  # pixels of a letter, about
_CONFIG = {
    "font": _FONT,
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--quiet)",
        "titleColor": "var(--quiet)",
        "titleFontWeight": "normal",
        "labelFontSize": 12,
        "titleFontSize": 12,
        "gridColor": "var(--grid)",
        "domainColor": "var(--line)",
        "tickColor": "var(--line)",
    },
    "axisY": {"domain": False, "ticks": False, "titleAnchor": "end", "titleAlign": "left"},
    "legend": {"labelColor": "var(--quiet)", "labelFontSize": 12, "orient": "top", "title": None},
    "text": {"color": "var(--quiet)", "fontSize": 12},
}


@dataclass(frozen=True)
class Chart:
    """One chart in the widths that it is drawn for, and where its axes are in each."""

    title: str
    specs: Mapping[str, dict[str, Any]]

    def html(self, name: str = "") -> Any:
        """For a template: all widths, of which a page shows the one that fits."""
        drawn = "".join(
            f'<div class="{width}" data-left="{spec["padding"]["left"]}" '
            f'data-right="{spec["padding"]["right"]}">{_drawn(spec)}</div>'
            for width, spec in self.specs.items()
        )
        shown = markup('<div class="chart" id="{}" role="img" tabindex="0" aria-label="{}">')
        return shown.format(name, self.title) + markup(f"{drawn}</div>")

    def save(self, path: Path) -> Path:
        """As a file, which follows the reader's theme too."""
        tokens = (Path(__file__).parent / "tokens.css").read_text(encoding="utf-8")
        spec = {**self.specs["wide"], "title": _title(self.title)}
        spec["padding"] = {**spec["padding"], "top": spec["padding"]["top"] + 34}
        inside = f"<style>{tokens} svg {{ background: var(--ground) }}</style>"
        path.parent.mkdir(parents=True, exist_ok=True)
        drawn = _drawn(spec).replace(">", f">{inside}", 1)
        path.write_text(drawn + "\n", encoding="utf-8")
        return path


def area(title: str, values: Sequence[float], unit: str, x: str, limit: float = 0.0) -> Chart:
    """A filled curve over the places of `values`, its peak marked; a dotted rule at `limit`."""
    peak = max(range(len(values)), key=lambda n: values[n], default=0)
    step = [{"x": n, "y": v} for n, v in enumerate([*values, *values[-1:]])]
    marks: list[dict[str, Any]] = [
        {
            "mark": {
                "type": "area",
                "interpolate": "step-after",
                "color": "var(--s0)",
                "opacity": 0.35,
                "line": {"color": "var(--s0)", "strokeWidth": 1.5},
            }
        },
        {
            "data": {"values": [{"x": peak + 0.5, "y": values[peak] if values else 0}]},
            "mark": {
                "type": "point",
                "filled": True,
                "color": "var(--s1)",
                "size": 60,
                "opacity": 1,
            },
        },
    ]
    if limit:
        rule = {"type": "rule", "color": "var(--s1)", "strokeDash": [2, 3]}
        marks.append({"data": {"values": [{"y": limit}]}, "mark": rule, "encoding": {"x": None}})
    encoding = {
        "x": _axis("x", x, {"domain": [0, max(len(values), 1)], "nice": False}),
        "y": _axis("y", unit, {"zero": True}),
    }
    spec = {"data": {"values": step}, "encoding": encoding, "layer": marks}
    return _chart(title, spec, height=190, left=56, right=12)


def bars(title: str, rows: Mapping[str, Sequence[tuple[str, float, str]]]) -> Chart:
    """Horizontal bars: for each row its series by name, a length and what is written beside it."""
    values = [
        {"row": row, "series": series, "length": length, "text": text}
        for row, group in rows.items()
        for series, length, text in group
    ]
    lengths = [length for group in rows.values() for _, length, _ in group]
    series = list(dict.fromkeys(name for group in rows.values() for name, _, _ in group))
    order = {"field": "row", "type": "nominal", "sort": list(rows), "title": None}
    offset = {"field": "series", "sort": series}
    axis = {"domain": False, "ticks": False, "labelPadding": 8}
    y = {**order, "axis": axis, "scale": {"paddingInner": 0.3}}
    x = {"field": "length", "type": "quantitative", "axis": None}
    top = 1.35 * max(lengths, default=1.0)  # room for the text
    spec = {
        "data": {"values": values},
        "encoding": {
            "y": y,
            "yOffset": offset,
            "x": {**x, "scale": {"domain": [0, top or 1.0]}},
        },
        "layer": [
            {"mark": {"type": "bar", "cornerRadiusEnd": 2}, "encoding": {"color": _colour(series)}},
            {
                "mark": {"type": "text", "align": "left", "dx": 5, "baseline": "middle"},
                "encoding": {"text": {"field": "text"}},
            },
        ],
    }
    left = 14 + round(_LETTER * max(map(len, rows), default=4))
    height = len(rows) * (14 + 15 * len(series)) + 10
    top_room = 34 if len(series) > 1 else 8
    return _chart(title, spec, height, min(left, 240), 8, top=top_room, bottom=6)


def lines(
    title: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    x: str,
    y: str,
    powers_of_two: bool = False,
    log: bool = False,
    marks: Sequence[tuple[str, float, float]] = (),
) -> Chart:
    """Lines, each with its name at its end: over powers of two, or on two logarithmic axes.

    Points are marked at `marks` of a series, or else all of them.
    """
    values = [{"x": a, "y": b, "name": n} for n, points in series.items() for a, b in points]
    shown = [{"x": a, "y": b, "name": n} for n, a, b in marks] or values
    ends = _apart([(name, *points[-1]) for name, points in series.items() if points], values, log)
    across: dict[str, Any] = {"nice": False, "zero": False, "type": "log" if log else "linear"}
    ticks: dict[str, Any] = {"values": _decades([v["x"] for v in values])} if log else {}
    if powers_of_two:
        across |= {"type": "log", "base": 2}
        ticks = {"values": sorted({v["x"] for v in values})}
    if ticks:
        ticks |= {"labelFlush": False, "labelOverlap": "parity", **_ALL}
    up = {"type": "log", "nice": False} if log else {"zero": True}
    rows = {"values": _decades([v["y"] for v in values]), **_ALL} if log else {}
    layer: list[dict[str, Any]] = [
        {"mark": {"type": "line", "strokeWidth": 2}},
        {
            "mark": {"type": "point", "filled": True, "size": 36, "opacity": 1},
            "data": {"values": shown},
        },
    ]
    if len(series) > 1:
        mark = {"type": "text", "align": "left", "dx": 8, "fontWeight": 600}
        label = {"mark": mark, "data": {"values": ends}, "encoding": {"text": {"field": "name"}}}
        layer.append(label)
    spec = {
        "data": {"values": values},
        "encoding": {
            "x": _axis("x", x, across, ticks),
            "y": _axis("y", y, up, rows),
            "color": {**_colour(list(series), "name"), "legend": None},
        },
        "layer": layer,
    }
    right = 16 + round(_LETTER * 1.15 * max(map(len, series))) if len(series) > 1 else 16
    return _chart(title, spec, _HEIGHT, left=56, right=right)


def _apart(
    ends: Sequence[tuple[str, float, float]], values: Sequence[Mapping[str, Any]], log: bool
) -> list[dict[str, Any]]:
    """The names at the ends of lines, those that would overlap moved upwards."""
    curve, back = (math.log, math.exp) if log else (float, float)
    known = [curve(v["y"]) for v in values]
    low, high = (min(known) if log else 0.0), max(known)
    line = 14 / _HEIGHT * (high - low)  # the height of a name
    found, floor = [], -math.inf
    for name, x, y in sorted(ends, key=lambda end: end[2]):
        floor = max(curve(y), floor + line)
        found.append({"x": x, "y": back(floor), "name": name})
    return found


def _decades(values: Sequence[Any]) -> list[float]:
    """1, 2 and 5 times the powers of ten within the values; 1 alone where that is enough."""
    low, high = min(values, default=1.0), max(values, default=1.0)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1,) if high > 3000 * low else (1, 2, 5)
    return [s * 10.0**p for p in powers for s in steps if low <= s * 10.0**p <= high]


def _colour(series: Sequence[str], field: str = "series") -> dict[str, Any]:
    colours = [f"var(--s{n % 12})" for n in range(len(series))]
    scale = {"domain": list(series), "range": colours}
    legend = {} if len(series) > 1 else {"legend": None}
    return {"field": field, "type": "nominal", "scale": scale, **legend}


def _axis(
    field: str, title: str, scale: dict[str, Any], more: dict[str, Any] | None = None
) -> dict[str, Any]:
    side = {"titleAngle": 0, "titleY": -10, "titleX": 0} if field == "y" else {"grid": False}
    axis = {"title": title, "tickCount": 5, **side, **(more or {})}
    return {"field": field, "type": "quantitative", "scale": scale, "axis": axis}


def _title(text: str) -> dict[str, Any]:
    style = {"color": "var(--ink)", "fontSize": 15, "fontWeight": 600}
    return {"text": text, "anchor": "start", "frame": "bounds", "offset": 22, **style}


def _chart(
    title: str,
    spec: dict[str, Any],
    height: int,
    left: int,
    right: int,
    top: int = 26,
    bottom: int = 40,
) -> Chart:
    lefts = {name: min(left, width * 2 // 5) for name, width in _WIDTHS.items()}
    specs = {
        name: {
            "$schema": _SCHEMA,
            "background": None,
            "autosize": {"type": "none"},
            "padding": {"left": lefts[name], "right": right, "top": top, "bottom": bottom},
            "width": width - lefts[name] - right,
            "height": height,
            "config": {**_CONFIG, "axisYBand": {"labelLimit": lefts[name] - 12}},
            **spec,
        }
        for name, width in _WIDTHS.items()
    }
    return Chart(title, specs)


def _drawn(spec: dict[str, Any]) -> str:
    return _svg(json.dumps(spec))


@functools.lru_cache(maxsize=64)
def _svg(spec: str) -> str:
    try:
        import vl_convert
    except ImportError as error:
        raise ModuleNotFoundError(EXTRA, name=error.name) from None
    return vl_convert.vegalite_to_svg(spec, vl_version="6.4")
