"""The annotations of a layout: arguments, results and tensors inside by name, and their JSON."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from gshard.autosharding.cost import NONE, Spec, sharding_of
from gshard.capture.inside import TensorSite, places
from gshard.tensors.sharding import Sharding
from gshard.untrusted import printable, read_object, short_repr

AXES = "abcdefgh"

Dims = tuple[tuple[str, ...], ...]  # of each dim, the mesh axes that cut it, major to minor


@dataclasses.dataclass(frozen=True)
class Annotated:
    """One annotation: an argument or a result by its path, its shape, the mesh axes of each dim.

    `saves` is how many seconds longer a step takes without it, and without its like; `name` is what
    the user's function calls it: `p['w']`, not `[0]['w']`.
    """

    path: str
    shape: tuple[int, ...]
    dims: Dims
    saves: float = dataclasses.field(default=0.0, compare=False)
    name: str = dataclasses.field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.name or self.path}: {shown(self.dims)} of {'x'.join(map(str, self.shape))}"


@dataclasses.dataclass(frozen=True)
class AnnotatedInside:
    """An annotation of tensors that the program makes: all of a place, or some by number."""

    place: TensorSite
    numbers: tuple[int, ...] | None
    dims: Dims
    saves: float = dataclasses.field(default=0.0, compare=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensors."""
        return self.place.shape

    def __str__(self) -> str:
        some = "" if self.numbers is None else f" number {_ranges(self.numbers)}"
        return f"{self.place}{some}: {shown(self.dims)}"


def annotated_in(
    flat: ClosedJaxpr, inside: Iterable[AnnotatedInside]
) -> dict[Any, AnnotatedInside]:
    """The tensors that a program makes at annotated places, with the annotation of each."""
    return {
        var: each
        for var, (place, number) in places(flat).items()
        for each in inside
        if each.place == place and (each.numbers is None or number in each.numbers)
    }


def _ranges(numbers: Iterable[int]) -> str:
    """Numbers for people: "0 to 7, 9"."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(f"{a} to {b}" if a < b else str(a) for a, b in found)


Group = tuple[Annotated | AnnotatedInside, ...]  # annotations that are alike, as of equal layers


def groups(annotations: Iterable[Annotated | AnnotatedInside]) -> list[Group]:
    """Annotations of equal tensors together: those of one shape, split alike."""
    found: dict[Any, list[Annotated | AnnotatedInside]] = {}
    for annotation in annotations:
        where = annotation.place.source if isinstance(annotation, AnnotatedInside) else ""
        found.setdefault((where, annotation.shape, annotation.dims), []).append(annotation)
    return [tuple(group) for group in found.values()]


def dims_of(spec: Sequence[int], rank: int) -> Dims:
    """The names of the mesh axes that cut each dim."""
    return tuple(
        tuple(AXES[axis] for axis, at in enumerate(spec) if at == dim) for dim in range(rank)
    )


def spec_of(dims: Dims, axes: tuple[str, ...]) -> Spec:
    """For each mesh axis the dim that it cuts, or `NONE`."""
    found = [next((d for d, names in enumerate(dims) if axis in names), NONE) for axis in axes]
    return tuple(found)


def shown(dims: Dims) -> str:
    """The mesh axes of each dim, as JAX writes them."""
    words = [json.dumps(axes[0]) if len(axes) == 1 else str(axes or None) for axes in dims]
    return f"P({', '.join(words)})".replace("'", '"')


def dims_on(sharding: Sharding, mesh: Mapping[str, int]) -> Dims | None:
    """The mesh axes of each dim under a sharding; None where axes of the mesh cannot express it."""
    sizes = tuple(mesh.values())
    for spec in itertools.product((NONE, *range(sharding.rank)), repeat=len(sizes)):
        if sharding_of(spec, sharding.rank, sizes).splits == sharding.splits:
            return dims_of(spec, sharding.rank)
    return None


def names_of(layout: Any) -> dict[str, str]:
    """What the user's function calls its arguments, by their paths: `p['w']`, not `[0]['w']`."""
    if layout.lowered is None:
        return {}
    leaves, _ = jax.tree_util.tree_flatten_with_path(layout.lowered.in_info)
    called = layout.lowered._own().subject.argument_names
    paths = [jax.tree_util.keystr(path) for path, leaf in leaves if hasattr(leaf, "dtype")]
    return {p: n for p, n in zip(paths, called, strict=False) if n} if called else {}


_FORMAT = "gshard layout 1"
_FIGURES = ("seconds", "memory_bytes", "bound", "solver_gap")


def as_text(layout: Any) -> str:
    """A layout as JSON."""
    names = names_of(layout)

    def entry(a: Annotated | AnnotatedInside) -> dict[str, Any]:
        dims = [list(axes) for axes in a.dims]
        return {"shape": list(a.shape), "dims": dims, "saves": a.saves}

    def listed(annotations: tuple[Annotated, ...]) -> dict[str, Any]:
        return {a.path: {"name": names.get(a.path, a.name), **entry(a)} for a in annotations}

    inside = [
        {
            **{name: getattr(a.place, name) for name in ("source", "operator", "backward")},
            "numbers": None if a.numbers is None else list(a.numbers),
            **entry(a),
        }
        for a in layout.inside
    ]
    content = {
        "format": _FORMAT,
        "mesh": dict(layout.mesh),
        "arguments": listed(layout.annotations),
        "results": listed(layout.results),
        "inside": inside,
        **{name: getattr(layout, name) for name in ("hardware", "stages", *_FIGURES)},
    }
    return json.dumps(content, indent=1) + "\n"


def read(path: str | Path) -> dict[str, Any]:
    """The fields of the layout in a file; what is wrong with it is an error that says where."""
    try:
        content = read_object(Path(path))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if content.get("format") != _FORMAT:
        raise ValueError(f"{path} is not a layout: its format is not {_FORMAT!r}")

    def field(name: str, kind: type, allowed: str, default: Any = None) -> Any:
        found = content.get(name, default)
        return _expect(f"{path}: {name}", found, isinstance(found, kind), allowed)

    mesh = field("mesh", dict, "an object with sizes by name")
    positive = bool(mesh) and all(_is_count(n, 1) for n in mesh.values())
    _expect(f"{path}: mesh", mesh, positive, "names with positive sizes")
    fields = {name: _number(f"{path}: {name}", content.get(name, math.nan)) for name in _FIGURES}
    fields |= {"mesh": mesh, "hardware": printable(str(content.get("hardware", "")))}
    for name, key in (("annotations", "arguments"), ("results", "results")):
        fields[name] = tuple(
            _annotated(f"{path}: {key.removesuffix('s')} {printable(at)}", at, entry, mesh)
            for at, entry in field(key, dict, "an object by path", {}).items()
        )
    fields["inside"] = tuple(
        _inside(f"{path}: inside {number}", entry, mesh)
        for number, entry in enumerate(field("inside", list, "a list", []))
    )
    stages = content.get("stages", 0)
    return {
        **fields,
        "stages": _expect(f"{path}: stages", stages, _is_count(stages, 0), "a number"),
    }


def _expect(where: str, value: Any, right: bool, allowed: str) -> Any:
    """A value, or an error where it is not right."""
    if not right:
        raise ValueError(f"{where} is {short_repr(value)}; allowed is {allowed}")
    return value


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _number(where: str, value: Any) -> Any:
    right = isinstance(value, (int, float)) and not isinstance(value, bool)
    return _expect(where, value, right, "a number")


def _annotated(where: str, path: str, entry: Any, mesh: Mapping[str, int]) -> Annotated:
    shape, dims, saves = _checked(where, entry, mesh)
    return Annotated(path, shape, dims, saves, printable(str(entry.get("name", ""))))


def _inside(where: str, entry: Any, mesh: Mapping[str, int]) -> AnnotatedInside:
    shape, dims, saves = _checked(where, entry, mesh)
    source, operator, numbers = map(entry.get, ("source", "operator", "numbers"))
    named = isinstance(source, str) and isinstance(operator, str)
    _expect(where, entry, named, "an object with a source and an operator too")
    right = numbers is None or (isinstance(numbers, list) and all(_is_count(n, 0) for n in numbers))
    _expect(f"{where}: numbers", numbers, right, "null, or a list of numbers >= 0")
    place = TensorSite(source, operator, bool(entry.get("backward")), shape)
    return AnnotatedInside(place, None if numbers is None else tuple(numbers), dims, saves)


def _checked(
    where: str, entry: Any, mesh: Mapping[str, int]
) -> tuple[tuple[int, ...], Dims, float]:
    """The shape and the dims of an entry, and what it saves."""
    described = isinstance(entry, dict) and {"shape", "dims"} <= set(entry)
    _expect(where, entry, described, "an object with shape and dims")
    shape, dims, order = entry["shape"], entry["dims"], list(mesh)
    sizes = isinstance(shape, list) and all(_is_count(n, 0) for n in shape)
    _expect(f"{where}: shape", shape, sizes, "a list of sizes")
    if not isinstance(dims, list) or len(dims) != len(shape):
        raise ValueError(f"{where} has {len(shape)} dims, and dims are given as {short_repr(dims)}")
    for axes in dims:
        _expect(f"{where}: a dim", axes, isinstance(axes, list), "a list of mesh axes")
    used = [axis for axes in dims for axis in axes]
    if unknown := [axis for axis in used if not isinstance(axis, str) or axis not in mesh]:
        raise ValueError(f"{where}: axis {short_repr(unknown[0])} is not in the mesh {order}")
    if len(set(used)) < len(used):
        raise ValueError(f"{where}: a mesh axis splits two dims: {short_repr(dims)}")
    if mixed := [axes for axes in dims if axes != sorted(axes, key=order.index)]:
        raise ValueError(
            f"{where}: the axes of a dim are {short_repr(mixed[0])}; their order has to be that of "
            f"the mesh, {order}"
        )
    saves = _number(f"{where}: saves", entry.get("saves", 0.0))
    return tuple(shape), tuple(tuple(axes) for axes in dims), saves
