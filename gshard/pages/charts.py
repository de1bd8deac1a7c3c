"""Charts by Vega-Lite, drawn when a page is made: SVG in the page's colours, light and dark.

Colours are the page's CSS variables (`tokens.css`), so a chart follows the reader's theme without
a script. Each is drawn for wide and for narrow screens. Where the axes are in the picture is known,
so that `chart.js` can show what is under the pointer.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gshard.pages.template import markup, needed, written

_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"  # a name; nothing is asked for there
WIDTHS = {"wide": 860, "narrow": 350, "small": 300}
_FONT = "system-ui, -apple-system, Segoe UI, Roboto, Noto Sans, DejaVu Sans, sans-serif"
LETTER = 6.6  # pixels of a letter, about
_CONFIG = {
    "font": _FONT,
    "aria": False,  # the chart as one has a label; marks do not need any
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
    across: tuple[float, float, bool] | None = None  # ends of the x axis, and whether it is a log
    legend: Sequence[tuple[str, str]] = ()  # names and colours, where there is no room for names

    def html(self, name: str = "") -> Any:
        """For a template: all widths, of which a page shows the one that fits."""
        drawn = "".join(
            f'<div class="{width}" data-left="{spec["padding"]["left"]}" '
            f'data-right="{spec["padding"]["right"]}">{_drawn(spec)}</div>'
            for width, spec in self.specs.items()
        )
        low, high, log = self.across or ("", "", False)
        shown = markup(
            '<div class="chart" id="{}" role="img" tabindex="0" aria-label="{}" '
            'data-low="{}" data-high="{}" data-log="{}">'
        )
        shown = shown.format(name, written(self.title), low, high, int(log)) + markup(drawn)
        if self.legend:
            key = markup('<span><i class="key" style="--c:{}"></i>{}</span>')
            legend = written(self.legend)
            keys = markup("").join(key.format(colour, name) for name, colour in legend)
            shown += markup('<div class="legend">') + keys + markup("</div>")
        return shown + markup("</div>")

    def save(self, path: Path) -> Path:
        """As a file, which follows the reader's theme too."""
        tokens = (Path(__file__).parent / "tokens.css").read_text(encoding="utf-8")
        spec = {**self.specs["wide"], "title": _title(self.title)}
        spec["padding"] = {**spec["padding"], "top": spec["padding"]["top"] + 38}
        inside = f"<style>{tokens} svg {{ background: var(--ground) }}</style>"
        path.parent.mkdir(parents=True, exist_ok=True)
        drawn = _drawn(spec).replace(">", f">{inside}", 1)
        path.write_text(drawn + "\n", encoding="utf-8")
        return path


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
        "encoding": {"y": y, "yOffset": offset, "x": {**x, "scale": {"domain": [0, top or 1.0]}}},
        "layer": [
            {"mark": {"type": "bar", "cornerRadiusEnd": 2}, "encoding": {"color": _colour(series)}},
            {
                "mark": {"type": "text", "align": "left", "dx": 5, "baseline": "middle"},
                "encoding": {"text": {"field": "text"}},
            },
        ],
    }
    left = 14 + round(LETTER * max(map(len, rows), default=4))
    height = len(rows) * (14 + 15 * len(series)) + 10
    top_room = 34 if len(series) > 1 else 8
    return draw(title, spec, height, min(left, 240), 8, top=top_room, bottom=6)


def _colour(series: Sequence[str], field: str = "series") -> dict[str, Any]:
    colours = [f"var(--s{n % 12})" for n in range(len(series))]
    scale = {"domain": list(series), "range": colours}
    legend = {} if len(series) > 1 else {"legend": None}
    return {"field": field, "type": "nominal", "scale": scale, **legend}


def _title(text: str) -> dict[str, Any]:
    style = {"color": "var(--ink)", "fontSize": 15, "fontWeight": 600}
    return {"text": text, "anchor": "start", "frame": "bounds", "offset": 22, **style}


def draw(
    title: str,
    spec: dict[str, Any],
    height: int,
    left: int,
    right: int,
    top: int = 26,
    bottom: int = 40,
    widths: Sequence[str] = ("wide", "narrow"),
    **more: Any,
) -> Chart:
    """The chart of a Vega-Lite spec, in several widths, with room around it for axes and names."""
    specs = {}
    for name in widths:
        room = {"left": min(left, WIDTHS[name] * 2 // 5), "right": right}
        specs[name] = {
            "$schema": _SCHEMA,
            "background": None,
            "autosize": {"type": "none"},
            "padding": {**room, "top": top, "bottom": bottom},
            "width": WIDTHS[name] - sum(room.values()),
            "height": height,
            "config": {**_CONFIG, "axisYBand": {"labelLimit": room["left"] - 12}},
            **spec,
        }
    return Chart(title, specs, **more)


def _drawn(spec: dict[str, Any]) -> str:
    return _svg(json.dumps(written(spec)))  # what is not written would abort the process


@functools.lru_cache(maxsize=64)
def _svg(spec: str) -> str:
    drawn = needed("vl_convert").vegalite_to_svg(spec, vl_version="6.4")
    return re.sub(r"(\.\d\d)\d{3,}", r"\1", drawn)  # hundredths of a pixel are enough
