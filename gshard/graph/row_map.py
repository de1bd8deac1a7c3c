"""Row maps: tensors that are painted, window after window, with elements of other tensors.

Slices, pads, reversals, concatenations, updates and broadcasts are of this kind, and so are all
their compositions. A `Layer` is a window: along each dim, rows of the result that are a constant
step apart are rows of a source that are a constant stride apart. Later layers cover earlier ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Axis(NamedTuple):
    """`rows` rows of the result, from `at` on, `step` apart: rows of the source's `dim`.

    There they are `stride` apart. Without a `dim`, the source has the same value for all of them.
    """

    at: int
    rows: int
    dim: int | None = None
    step: int = 1
    stride: int = 1

    @property
    def end(self) -> int:
        """The row behind the last."""
        return self.at + (self.rows - 1) * self.step + 1

    @property
    def is_run(self) -> bool:
        """Whether neighbours in the result are neighbours in the source, in this order."""
        return self.step == self.stride == 1


@dataclass(frozen=True, repr=False)
class Layer:
    """A window of the result with elements of `source`, of which `base` is the first.

    A source is an atom of a program, or the number of an operand.
    """

    source: Any
    base: tuple[int, ...]
    axes: tuple[Axis, ...]

    def __repr__(self) -> str:
        """Rows of the source, and where they are: `0[1:8, 0:2] at [0:7, 0:2]`."""
        read = {a.dim: a for a in self.axes}
        rows = (
            _range(f, read[d].rows, read[d].stride) if d in read else str(f)
            for d, f in enumerate(self.base)
        )
        there = (_range(axis.at, axis.rows, axis.step) for axis in self.axes)
        return f"{self.source}[{', '.join(rows)}] at [{', '.join(there)}]"

    @functools.cached_property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(axis.rows for axis in self.axes)

    @property
    def is_constant(self) -> bool:
        """Whether all elements are the same scalar."""
        return not self.base

    def is_all(self, shape: Sequence[int]) -> bool:
        """Whether it is the entire source, in its place, and all of a result of this shape."""
        return self == entire(self.source, shape)

    def keeps(self, dim: int, size: int, shape: Sequence[int]) -> bool:
        """Whether all `size` rows of a dim are those of the source, of this shape, or repeated."""
        axis = self.axes[dim]
        if axis.dim is None:
            return axis.rows == size
        kept = axis == Axis(0, size, axis.dim) and shape[axis.dim] == size
        return kept and self.base[axis.dim] == 0

    @property
    def is_aligned(self) -> bool:
        """Whether the source has the result's dims."""
        return [axis.dim for axis in self.axes] == [*range(len(self.base))]

    def of(self, source: Any) -> Layer:
        """The same window of another source."""
        return Layer(source, self.base, self.axes)

    def along(self, dim: int, axis: Axis, base: int | None = None) -> Layer:
        """The layer with other rows along one dim."""
        first = list(self.base)
        if base is not None and axis.dim is not None:
            first[axis.dim] = base
        return Layer(self.source, tuple(first), (*self.axes[:dim], axis, *self.axes[dim + 1 :]))

    def read(self, dim: int) -> slice:
        """The rows of a source's dim, upwards: what a slice takes."""
        axis = next((axis for axis in self.axes if axis.dim == dim), Axis(0, 1))
        base, last = self.base[dim], self.base[dim] + max(axis.rows - 1, 0) * axis.stride
        return slice(min(base, last), max(base, last) + (axis.rows > 0), abs(axis.stride))

    def part(self, dim: int, low: int, high: int) -> Layer:
        """The rows `low` to `high` of the result along a dim, where it has no gaps."""
        axis = self.axes[dim]
        base = None
        if axis.dim is not None:
            base = self.base[axis.dim] + (low - axis.at) * axis.stride
        return self.along(dim, axis._replace(at=low, rows=high - low), base)

    def is_apart_from(self, other: Layer) -> bool:
        """Whether no place belongs to both; not knowing is no."""
        return any(
            a.end <= b.at or b.end <= a.at or (a.step == b.step > 1 and (a.at - b.at) % a.step > 0)
            for a, b in zip(self.axes, other.axes, strict=True)
        )

    def hides(self, other: Layer) -> bool:
        """Whether it covers another layer."""
        return all(map(_covers, self.axes, other.axes))


def _range(first: int, count: int, step: int) -> str:
    return f"{first}:{first + count * step}" + (f":{step}" if step != 1 else "")


def _covers(upper: Axis, lower: Axis) -> bool:
    """Whether each row of one is a row of the other."""
    if not (upper.at <= lower.at and lower.end <= upper.end):
        return False
    return upper.step == 1 or (
        (lower.at - upper.at) % upper.step == 0
        and (lower.step % upper.step == 0 or lower.rows == 1)
    )


def entire(source: Any, shape: Sequence[int]) -> Layer:
    """All of a tensor."""
    return Layer(source, (0,) * len(shape), tuple(Axis(0, n, d) for d, n in enumerate(shape)))


def constant(source: Any, shape: Sequence[int]) -> Layer:
    """A scalar in every place."""
    return Layer(source, (), tuple(Axis(0, n) for n in shape))


def visible(layers: Iterable[Layer], below: Iterable[Layer] = ()) -> tuple[Layer, ...]:
    """Layers that have elements over visible ones; of a few, those that no later one covers."""
    found = list(below)
    for layer in layers:
        if layer.size:
            if len(found) <= _FEW:
                found = [below for below in found if not layer.hides(below)]
            found.append(layer)
    return tuple(found)


_FEW = 16  # layers: each is compared with each


def through(outer: Layer, inner: Iterable[Layer]) -> Iterator[Layer]:
    """The layers by which `outer` is painted, if its source is painted by `inner`."""
    driven = {axis.dim: d for d, axis in enumerate(outer.axes) if axis.dim is not None}
    for layer in inner:
        base, axes = list(layer.base), list(outer.axes)
        for e, own in enumerate(layer.axes):
            if e in driven:
                met = _met(outer.axes[driven[e]], outer.base[e], own)
            else:  # a single row of the source
                met = _met(Axis(0, 1, e), outer.base[e], own)
            if met is None:
                break
            axis, first = met
            if own.dim is not None:
                base[own.dim] += first * own.stride
            if e in driven:
                axes[driven[e]] = axis
        else:
            yield Layer(layer.source, tuple(base), tuple(axes))


def _met(outer: Axis, base: int, own: Axis) -> tuple[Axis, int] | None:
    """The rows that `outer` reads, from `base` on, and that `own` has written.

    And the number of the first of these in `own`.
    """
    if outer.is_run and own.is_run:  # nearly always
        low, high = max(base, own.at), min(base + outer.rows, own.at + own.rows)
        if low >= high:
            return None
        return Axis(outer.at + low - base, high - low, own.dim), low - own.at
    common = math.gcd(outer.stride, own.step)
    if (own.at - base) % common:
        return None
    every, reads = own.step // common, outer.stride // common
    # The reads k with base + k * outer.stride == own.at + j * own.step, which are `every` apart.
    first = (own.at - base) // common * pow(reads, -1, every) % every if every > 1 else 0
    number = (base + first * outer.stride - own.at) // own.step
    if reads > 0:
        low, high = -(number // reads), (own.rows - 1 - number) // reads
    else:
        low, high = -((own.rows - 1 - number) // -reads), number // -reads
    low, high = max(low, 0), min(high, (outer.rows - 1 - first) // every)
    if low > high:
        return None
    at, count = outer.at + (first + low * every) * outer.step, high - low + 1
    begin = number + low * reads
    if count == 1:
        return Axis(at, 1, own.dim), begin
    stride = own.stride * reads if own.dim is not None else 1
    return Axis(at, count, own.dim, outer.step * every, stride), begin


def by_rows(layer: Layer) -> Iterator[Layer]:
    """The layer, or its rows one by one, of a dim that the source lost and the result has again.

    `x[3]` in row 5 of a tensor like `x` is the slice `x[3:4]` there. A few rows that are repeated
    or reversed, as at a padded border, are windows of one row.
    """
    if len(layer.base) != len(layer.axes):
        yield layer
        return
    used = {axis.dim for axis in layer.axes}
    for d, axis in enumerate(layer.axes):
        lost = axis.dim is None and d not in used
        if axis.rows == 1 and lost:
            yield from by_rows(layer.along(d, axis._replace(dim=d)))
            return
        if 1 < axis.rows <= _SINGLY and (lost or (axis.dim == d and not axis.is_run)):
            for k in range(axis.rows):
                row = Axis(axis.at + k * axis.step, 1, d)
                moved = 0 if lost else k * axis.stride
                yield from by_rows(layer.along(d, row, layer.base[d] + moved))
            return
    yield layer


_SINGLY = 4  # rows


def shape_of(layers: Sequence[Layer]) -> tuple[int, ...]:
    """The shape of the result, every place of which belongs to a layer."""
    return tuple(
        max(axis.end for axis in axes) for axes in zip(*(n.axes for n in layers), strict=False)
    )


def cut_dims(layers: Iterable[Layer], shape: Sequence[int]) -> set[int]:
    """The dims along which some layer does not have all rows of the result."""
    return {d for layer in layers for d, n in enumerate(shape) if layer.axes[d][:2] != (0, n)}


def apart(layers: Sequence[Layer], shape: Sequence[int]) -> Sequence[Layer]:
    """The layers in order and without their hidden rows, if they are runs of rows of one dim."""
    cut = cut_dims(layers, shape)
    if len(cut) != 1:
        return layers
    (dim,) = cut
    if not all(layer.axes[dim].step == 1 for layer in layers):
        return layers
    if len(layers) > _FEW and layers[0].is_constant:  # which would be as many pieces
        return layers
    found: list[Layer] = []
    free = [(0, shape[dim])]  # the rows that no later layer has
    for layer in reversed(layers):
        first, end, left = layer.axes[dim].at, layer.axes[dim].end, []
        for low, high in free:
            a, b = max(low, first), min(high, end)
            if a < b:
                found.append(layer.part(dim, a, b))
                left += [(low, a), (b, high)]
            else:
                left.append((low, high))
        free = [(low, high) for low, high in left if low < high]
    return sorted(found, key=lambda layer: layer.axes[dim].at)
