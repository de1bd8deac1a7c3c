"""The annotations of a layout: arguments, results and tensors inside the program, by name."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from gshard.autosharding.specs import NONE, Spec, sharding_of
from gshard.capture.inside import TensorSite
from gshard.tensors.sharding import Sharding

AXES = "abcdefgh"

Dims = tuple[tuple[str, ...], ...]  # of each dim, the mesh axes that cut it, major to minor


@dataclasses.dataclass(frozen=True)
class Annotated:
    """One annotation: an argument or a result by its path, its shape, the mesh axes of each dim.

    `saves` is how many seconds longer a step takes without it, and without its like.
    """

    path: str
    shape: tuple[int, ...]
    dims: Dims
    saves: float = dataclasses.field(default=0.0, compare=False)

    def __str__(self) -> str:
        return f"{self.path}: {shown(self.dims)} of {'x'.join(map(str, self.shape))}"


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


def path_name(path: Any) -> str:
    """The path of a leaf of (args, kwargs): `[0]['w']` of positional, `name['w']` of others."""
    first, second, *rest = path
    tail = jax.tree_util.keystr(tuple(rest))
    if first.idx == 0:
        return f"[{second.idx}]{tail}"
    return f"{second.key}{tail}"


def dims_of(spec: Spec, rank: int) -> Dims:
    """The names of the mesh axes that cut each dim."""
    return tuple(
        tuple(AXES[axis] for axis, at in enumerate(spec) if at == dim) for dim in range(rank)
    )


def spec_of(dims: Dims, axes: tuple[str, ...]) -> Spec:
    """For each mesh axis the dim that it cuts, or `NONE`."""
    found = [next((d for d, names in enumerate(dims) if axis in names), NONE) for axis in axes]
    return tuple(found)


def result_name(path: Any) -> str:
    """The path of a leaf of the results."""
    return f"result{jax.tree_util.keystr(path)}"


def shown(dims: Dims) -> str:
    """The mesh axes of each dim, for people."""
    return "(" + ", ".join("+".join(axes) if axes else "-" for axes in dims) + ")"


def dims_on(sharding: Sharding, mesh: Mapping[str, int]) -> Dims | None:
    """The mesh axes of each dim under a sharding; None where axes of the mesh cannot express it."""
    sizes = tuple(mesh.values())
    for spec in itertools.product((NONE, *range(sharding.rank)), repeat=len(sizes)):
        if sharding_of(spec, sharding.rank, sizes).splits == sharding.splits:
            return dims_of(spec, sharding.rank)
    return None
