"""Layouts in files: JSON that can be read and edited."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gshard.autosharding.annotated import Annotated, AnnotatedInside, Dims
from gshard.propagation.inside import Place

_FORMAT = "gshard layout 1"
_FIGURES = ("seconds", "bound", "solver_gap")


def as_text(layout: Any) -> str:
    """A layout as JSON."""

    def listed(annotations: tuple[Annotated, ...]) -> dict[str, Any]:
        return {
            a.path: {"shape": list(a.shape), "dims": _lists(a.dims), "saves": a.saves}
            for a in annotations
        }

    inside = [
        {
            "source": a.place.source,
            "operator": a.place.operator,
            "backward": a.place.backward,
            "shape": list(a.shape),
            "numbers": None if a.numbers is None else list(a.numbers),
            "dims": _lists(a.dims),
            "saves": a.saves,
        }
        for a in layout.inside
    ]
    content = {
        "format": _FORMAT,
        "mesh": dict(layout.mesh),
        "arguments": listed(layout.annotations),
        "results": listed(layout.results),
        "inside": inside,
        "hardware": layout.hardware,
        "memory_bytes": layout.memory_bytes,
        **{name: getattr(layout, name) for name in _FIGURES},
    }
    return json.dumps(content, indent=1) + "\n"


def read(path: str | Path) -> dict[str, Any]:
    """The fields of the layout in a file; what is wrong with it is an error that says where."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError(f"{path} is no layout: its format is not {_FORMAT!r}")
    given = content.get("mesh")
    mesh: dict[str, int] = given if isinstance(given, dict) else {}
    if not mesh or not all(isinstance(n, int) and n > 0 for n in mesh.values()):
        raise ValueError(f"{path}: mesh is {given!r}; allowed are names with positive sizes")
    kinds = {"annotations": ("arguments", "argument"), "results": ("results", "result")}
    fields: dict[str, Any] = {"mesh": mesh, "hardware": str(content.get("hardware", ""))}
    for field, (key, word) in kinds.items():
        entries = content.get(key, {})
        if not isinstance(entries, dict):
            raise ValueError(f"{path}: {key} are {entries!r}; allowed is an object by path")
        fields[field] = tuple(
            _annotated(f"{path}: {word} {name}", name, entry, mesh)
            for name, entry in entries.items()
        )
    fields["inside"] = tuple(
        _inside(f"{path}: inside {number}", entry, mesh)
        for number, entry in enumerate(content.get("inside", []))
    )
    fields["memory_bytes"] = content.get("memory_bytes", 0)
    return fields | {name: content.get(name, math.nan) for name in _FIGURES}


def _lists(dims: Dims) -> list[list[str]]:
    return [list(axes) for axes in dims]


def _annotated(where: str, name: str, entry: Any, mesh: Mapping[str, int]) -> Annotated:
    shape, dims = _checked(where, entry, mesh)
    return Annotated(name, shape, dims, entry.get("saves", 0.0))


def _inside(where: str, entry: Any, mesh: Mapping[str, int]) -> AnnotatedInside:
    shape, dims = _checked(where, entry, mesh)
    if not isinstance(entry.get("source"), str) or not isinstance(entry.get("operator"), str):
        raise ValueError(f"{where} is {entry!r}; it needs a source and an operator")
    numbers = entry.get("numbers")
    if numbers is not None and not all(isinstance(n, int) and n >= 0 for n in numbers):
        raise ValueError(f"{where}: numbers are {numbers!r}; allowed are numbers from 0, or null")
    place = Place(entry["source"], entry["operator"], bool(entry.get("backward")), shape)
    counted = None if numbers is None else tuple(numbers)
    return AnnotatedInside(place, counted, dims, entry.get("saves", 0.0))


def _checked(where: str, entry: Any, mesh: Mapping[str, int]) -> tuple[tuple[int, ...], Dims]:
    """The shape and the dims of an entry."""
    if not isinstance(entry, dict) or not {"shape", "dims"} <= set(entry):
        raise ValueError(f"{where} is {entry!r}; allowed is an object with shape and dims")
    shape, dims = entry["shape"], entry["dims"]
    if not isinstance(dims, list) or len(dims) != len(shape):
        raise ValueError(f"{where} has {len(shape)} dims, and dims are given as {dims!r}")
    used = [axis for axes in dims for axis in axes]
    if unknown := [axis for axis in used if axis not in mesh]:
        raise ValueError(f"{where}: axis {unknown[0]!r} is not in the mesh; it has {list(mesh)}")
    if len(set(used)) < len(used):
        raise ValueError(f"{where}: a mesh axis cuts two dims: {dims!r}")
    return tuple(shape), tuple(tuple(axes) for axes in dims)
