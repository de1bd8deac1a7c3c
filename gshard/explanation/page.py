"""The explanation as one self-contained HTML page: the program beside the user's source."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gshard.explanation.chains import chain
from gshard.explanation.charts import charts
from gshard.explanation.subject import Subject
from gshard.explanation.text import describe
from gshard.forecast import Forecast
from gshard.forecast.report import summary
from gshard.graph.source import source_of
from gshard.tensors.sharding import Sharding

_AROUND = 12  # lines of source shown before and after one that does something
_VALUES = 36  # shardings shown
_CELLS = 64  # tiles shown along each dim of a grid


def page(
    subject: Subject,
    forecast: Forecast,
    title: str,
    growth: Mapping[int, Forecast] | None = None,
) -> str:
    """The page; `growth` are forecasts of the same on other numbers of devices, for a plot."""
    template = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
    held = forecast.memory.peak - forecast.memory.temporary
    data = {
        "title": title,
        "devices": subject.num_devices,
        "summary": "\n".join(summary(forecast)),
        "operators": [_operator(t) for t in forecast.operators],
        "chains": _reasons(subject),
        "memory": [held + b for b in forecast.memory.along],
        "files": _files({t.source for t in forecast.operators}),
        "shardings": _shardings(subject),
    }
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    template = template.replace("<!--CHARTS-->", "\n".join(charts(forecast, growth)))
    return template.replace("TITLE", html.escape(title)).replace("/*DATA*/null", text)


def _operator(t: Any) -> dict[str, Any]:
    return {
        "name": t.name,
        "kind": t.collective,
        "seconds": float(t.total_seconds),
        "sent": t.sent * t.count,
        "count": t.count,
        "group": t.group_size,
        "bound": t.bound,
        "phase": t.phase,
        "line": t.source,
        "reason": t.reason,
    }


def _files(sources: set[str]) -> list[dict[str, Any]]:
    """The lines of the user's files that do something, and those around them."""
    wanted: dict[str, set[int]] = {}
    for source in sources:
        name, _, line = source.rpartition(":")
        if name and line.isdigit() and Path(name).is_file():
            near = range(int(line) - _AROUND, int(line) + _AROUND + 1)
            wanted.setdefault(name, set()).update(near)
    files = []
    for name in sorted(wanted):
        text = Path(name).read_text(encoding="utf-8", errors="replace").splitlines()
        lines = [[n, text[n - 1]] for n in sorted(wanted[name]) if 0 < n <= len(text)]
        files.append({"name": name, "lines": lines})
    return files


def _reasons(subject: Subject) -> dict[str, str]:
    """For each line that communicates, how the values of its first operator lie."""
    lines = {c.source for c in subject.values}
    found: dict[str, list[str]] = {}
    for eqn in subject.equations:
        source = source_of(eqn)
        told = found.setdefault(source, []) if source in lines else None
        if told is None or len(told) >= 4:
            continue
        for atom in (*eqn.invars, *eqn.outvars):
            sharding = subject.sharding(atom)
            if sharding is not None and sharding.splits:
                told.append(f"{_shape(atom)} of {eqn.primitive.name} is {describe(sharding)}")
    return {line: "\n".join(texts) for line, texts in found.items()}


def _shardings(subject: Subject) -> list[dict[str, Any]]:
    """The annotated values and the largest arguments."""
    values: dict[Any, str] = {e.outvars[0]: source_of(e) for e in subject.annotations}
    arguments = sorted(subject.flat.jaxpr.invars, key=lambda v: -np.prod(v.aval.shape))
    for var in arguments[:_VALUES]:
        values.setdefault(var, "an argument")
    shown: list[dict[str, Any]] = []
    seen = set()
    for var, source in values.items():
        sharding = subject.sharding(var)
        key = (_shape(var), source)
        if sharding is None or not sharding.splits or key in seen or len(shown) == _VALUES:
            continue
        seen.add(key)
        dim = next((d for d, s in enumerate(sharding.splits) if s), None)
        links = [] if dim is None or source != "an argument" else chain(subject, var, dim)
        shown.append(
            {
                "name": f"{_shape(var)} {source}",
                "words": describe(sharding),
                "line": source,
                "chain": " -> ".join(map(str, links[:6])),
                "cells": _cells(sharding),
            }
        )
    return shown


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


def _shape(var: Any) -> str:
    return var.aval.str_short(short_dtypes=True)
