"""A layout: a mesh, and which argument is sharded how over it. It can be kept in a file."""

from __future__ import annotations

import dataclasses
import functools
import html
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gshard.annotate import Annotation, annotate
from gshard.autosharding.specs import NONE, MeshShape, Spec, sharding_of
from gshard.forecast.report import duration, size
from gshard.jit import Jitted, jit
from gshard.runtime.stages import Lowered

_FORMAT = "gshard layout 1"
AXES = "abcdefgh"

Dims = tuple[tuple[str, ...], ...]  # of each dim, the mesh axes that cut it, major to minor


@dataclasses.dataclass(frozen=True)
class Annotated:
    """One annotation: an argument by its path, its shape, and the mesh axes of each dim."""

    path: str
    shape: tuple[int, ...]
    dims: Dims

    def __str__(self) -> str:
        shown = ", ".join("+".join(axes) if axes else "-" for axes in self.dims)
        return f"{self.path}: ({shown}) of {'x'.join(map(str, self.shape))}"


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh and annotations that were chosen for a program, and what they were chosen by.

    `seconds` and `memory_bytes` are the forecast of the lowered program. `model_seconds` is what
    the solver's model of it takes, and `bound` what every layout takes at least in that model.
    """

    mesh: Mapping[str, int]
    annotations: tuple[Annotated, ...]
    hardware: str
    seconds: float
    memory_bytes: int
    model_seconds: float
    bound: float
    considered: tuple[Mapping[str, Any], ...] = dataclasses.field(default=(), compare=False)
    lowered: Lowered | None = dataclasses.field(default=None, compare=False, repr=False)
    function: Callable[..., Any] | None = dataclasses.field(default=None, compare=False, repr=False)
    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    arguments: Any = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def devices(self) -> int:
        """The number of devices of the mesh."""
        return math.prod(self.mesh.values())

    @property
    def gap(self) -> float:
        """By how much the layout may exceed the best one in the solver's model, as a share."""
        return max(0.0, self.model_seconds - self.bound) / max(self.model_seconds, 1e-30)

    def annotated(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn` with the annotations on its arguments."""
        by_path = {a.path: a for a in self.annotations}

        @functools.wraps(fn)
        def with_annotations(*args: Any, **kwargs: Any) -> Any:
            leaves, tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
            named = [(path_name(path), leaf) for path, leaf in leaves]
            _check(by_path, dict(named), fn)
            marked = [self._mark(by_path.get(name), leaf) for name, leaf in named]
            args, kwargs = tree.unflatten(marked)
            return fn(*args, **kwargs)

        return with_annotations

    def _mark(self, said: Annotated | None, leaf: Any) -> Any:
        if said is None:
            return leaf
        spec = _spec(said.dims, tuple(self.mesh))
        sharding = sharding_of(spec, len(said.shape), tuple(self.mesh.values()))
        return annotate(leaf, Annotation.of_sharding(f"layout: {said}", sharding))

    def jit(self, **keywords: Any) -> Jitted[..., Any]:
        """The function that the layout was chosen for, partitioned by it."""
        if self.function is None:
            raise ValueError(
                "a layout that was loaded has no function: use gshard.jit(fn, annotations=layout)"
            )
        return jit(self.function, annotations=self, **{**self.keywords, **keywords})  # type: ignore[no-any-return]

    def to_jax(self) -> tuple[Mesh, Any]:
        """The mesh, on this machine's first devices, and `in_shardings`, for plain `jax.jit`."""
        if self.arguments is None:
            raise ValueError("a layout that was loaded has no arguments to make in_shardings for")
        devices = np.array(jax.devices()[: self.devices]).reshape(tuple(self.mesh.values()))
        mesh = Mesh(devices, tuple(self.mesh))
        by_path = {a.path: a for a in self.annotations}

        def sharding(path: Any, leaf: Any) -> NamedSharding:
            said = by_path.get(path_name(path))
            dims = said.dims if said else ()
            return NamedSharding(mesh, PartitionSpec(*(axes or None for axes in dims)))

        args, _ = jax.tree_util.tree_map_with_path(sharding, (self.arguments, {}))
        return mesh, args

    # ------------------------------------------------------------ files

    def save(self, path: str | Path) -> None:
        """Write it as JSON, which can be read and edited."""
        arguments = {
            a.path: {"shape": list(a.shape), "dims": [list(axes) for axes in a.dims]}
            for a in self.annotations
        }
        said = {
            "format": _FORMAT,
            "mesh": dict(self.mesh),
            "arguments": arguments,
            "hardware": self.hardware,
            "seconds": self.seconds,
            "memory_bytes": self.memory_bytes,
            "model_seconds": self.model_seconds,
            "bound": self.bound,
        }
        Path(path).write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Layout:
        """Read what `save` wrote; a file edited into nonsense is an error that says where."""
        try:
            said = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
        if not isinstance(said, dict) or said.get("format") != _FORMAT:
            raise ValueError(f"{path} is no layout: its format is not {_FORMAT!r}")
        mesh = said.get("mesh")
        mesh = mesh if isinstance(mesh, dict) else {}
        sizes = mesh.values()
        if not sizes or not all(isinstance(n, int) and n > 0 for n in sizes):
            raise ValueError(
                f"{path}: mesh is {said.get('mesh')!r}; allowed are names with positive sizes"
            )
        annotations = tuple(
            _read(path, name, entry, mesh) for name, entry in said.get("arguments", {}).items()
        )
        figures = {k: said.get(k, math.nan) for k in ("seconds", "model_seconds", "bound")}
        memory = said.get("memory_bytes", 0)
        return Layout(mesh, annotations, said.get("hardware", ""), memory_bytes=memory, **figures)

    # ------------------------------------------------------------ to be read

    def __str__(self) -> str:
        mesh = " x ".join(f"{name}={n}" for name, n in self.mesh.items())
        lines = [
            f"mesh {mesh} on {self.devices} x {self.hardware}",
            f"forecast: {duration(self.seconds)} a step, {size(self.memory_bytes)} on each device",
            f"model: {duration(self.model_seconds)}; no layout takes less than "
            f"{duration(self.bound)} in it (gap {100 * self.gap:.2f}%)",
        ]
        lines += [f"  {a}" for a in self.annotations] or ["  no annotations"]
        return "\n".join(lines)

    def explain(self) -> str:
        """What was considered, and why the others lost."""
        lines = [str(self), "considered:"]
        for entry in sorted(self.considered, key=lambda e: e["seconds"]):
            against = entry["seconds"] / self.seconds - 1
            fits = "" if entry["fits"] else ", too much memory"
            lines.append(
                f"  {entry['name']}: {duration(entry['seconds'])} ({100 * against:+.1f}%), "
                f"{size(entry['memory_bytes'])}{fits}"
            )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def path_name(path: Any) -> str:
    """The path of a leaf of (args, kwargs): `[0]['w']` of positional, `name['w']` of others."""
    first, second, *rest = path
    tail = jax.tree_util.keystr(tuple(rest))
    if first.idx == 0:
        return f"[{second.idx}]{tail}"
    return f"{second.key}{tail}"


def dims_of(spec: Spec, rank: int, mesh: MeshShape) -> Dims:
    """The names of the mesh axes that cut each dim."""
    return tuple(
        tuple(AXES[axis] for axis, at in enumerate(spec) if at == dim) for dim in range(rank)
    )


def _spec(dims: Dims, axes: tuple[str, ...]) -> Spec:
    found = [next((d for d, names in enumerate(dims) if axis in names), NONE) for axis in axes]
    return tuple(found)


def _check(said: Mapping[str, Annotated], given: Mapping[str, Any], fn: Any) -> None:
    """Refuse a layout of another program."""
    name = getattr(fn, "__name__", str(fn))
    for path, annotation in said.items():
        if path not in given:
            raise ValueError(
                f"the layout annotates argument {path}, which {name} was not given; its arguments "
                f"are {', '.join(given) or 'none'}"
            )
        shape = tuple(np.shape(given[path]))
        if shape != annotation.shape:
            raise ValueError(
                f"the layout is for an argument {path} of shape {annotation.shape}; {name} was "
                f"given one of shape {shape}"
            )


def _read(path: Any, name: str, entry: Any, mesh: Mapping[str, int]) -> Annotated:
    where = f"{path}: argument {name}"
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
    return Annotated(name, tuple(shape), tuple(tuple(axes) for axes in dims))
