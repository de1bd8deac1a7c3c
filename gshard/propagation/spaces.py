"""Rows of a tensor as rows of another one, in whose tiles it is computed.

A `Place` says so, dim by dim. Windows of tensors can be written in terms of tensors in other
places, and priced: only rows that cross from tile to tile are sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from gshard.graph.row_map import Axis, Layer, entire, through
from gshard.tensors.sharding import Split


class Space(NamedTuple):
    """Rows of a tensor are the rows from `first` on, `step` apart, of `size` rows in tiles.

    If only the rows `low` to `high` are wanted, which one tile has, tiles are as small as that.
    """

    size: int
    first: int
    step: int
    split: Split
    low: int
    high: int

    @property
    def is_border(self) -> bool:
        """Whether only a few rows are wanted."""
        return self.high - self.low < self.size

    @property
    def gap(self) -> int:
        """How far apart rows are held: next to each other where tiles begin alike then."""
        return self.step if self.split.rows(self.size) % self.step else 1

    @property
    def held(self) -> int:
        """The rows of all tiles."""
        if self.is_border:
            return (self.high - self.low) * self.split.tiles
        return -(-self.size * self.gap // self.step)

    @property
    def begin(self) -> int:
        """The row of the tiles that the first wanted row is."""
        tile = self.low // self.split.rows(self.size)
        return tile * (self.high - self.low) if self.is_border else 0

    def shared(self, rows: int) -> tuple[int, int, int]:
        """The first of a tensor's rows that is there, how many are, and where the first is."""
        first = max(0, -((self.first - self.low) // self.step))
        last = min(rows, -((self.first - self.high) // self.step))
        at = self.first + self.step * first - self.low + self.begin
        return first, max(last - first, 0), at * self.gap // self.step


Place = tuple[tuple[int, Space], ...]  # the dims of a tensor whose rows are in another space


def fits(var: Any, place: Place) -> bool:
    """Whether a space has all rows of a tensor."""
    return all(
        space.low <= space.first and space.first + space.step * (var.aval.shape[d] - 1) < space.high
        for d, space in place
    )


def distance(layer: Layer) -> int:
    """How far rows are from where they are read."""
    if layer.is_constant:
        return 0
    read = [(a, layer.base[a.dim]) for a in layer.axes if a.dim is not None]
    return sum(abs(first - a.at * a.stride // a.step) for a, first in read)


def rank(layer: Layer) -> tuple[int, int]:
    """The most rows first, and then the nearest."""
    return layer.size, -distance(layer)


def window_of(source: Any, place: Place, var: Any) -> Layer:
    """The rows of a tensor that `source` has, which is that tensor in a place."""
    window = entire(source, var.aval.shape)
    for d, space in place:
        first, rows, at = space.shared(var.aval.shape[d])
        window = window.along(d, Axis(first, rows, d, 1, space.gap), at)
    return window


def extended(layer: Layer, place: Place, shape: Sequence[int]) -> Iterator[Layer]:
    """A layer of a tensor of this shape in a place, with as many rows as there are.

    Only beyond the rows that the tensor has: those are garbage.
    """
    window = entire(layer.source, shape)
    for d, space in place:
        first, rows, at = space.shared(shape[d])
        window = window.along(d, Axis(at, rows, d, space.gap), first)
    for found in through(window, [layer]):
        for d, space in place:
            axis, own = found.axes[d], layer.axes[d]
            if own.step > 1:  # between its rows are those of other layers
                continue
            low = space.begin if own.at == 0 else axis.at
            end = space.begin + (space.high - space.low if space.is_border else space.held)
            high = end if own.end == shape[d] else axis.end
            every, rest = divmod(axis.stride, axis.step)
            if axis.dim is None:
                found = found.along(d, Axis(low, high - low))
            elif every > 0 and not rest:
                start = found.base[axis.dim] - every * axis.at  # the source's row for row 0
                low = max(low, -(start // every))
                high = min(high, -((start - layer.source.aval.shape[axis.dim]) // every))
                axis = Axis(low, high - low, axis.dim, 1, every)
                found = found.along(d, axis, start + every * low)
        yield found


def bytes_sent(
    source: Any,
    before: Sequence[Split | None],
    layers: Sequence[Layer],
    shape: Sequence[int],
    after: Sequence[Split | None],
) -> float:
    """The bytes that a device sends for windows of a source in tensors of a shape."""
    sent, size = 0.0, max(layer.size for layer in layers) * source.aval.dtype.itemsize
    for d, layer_split in enumerate(before):
        axes = [(axis, n.base[d]) for n in layers for axis in n.axes if axis.dim == d]
        if layer_split is None or not axes:
            continue
        to = [e for e, axis in enumerate(layers[0].axes) if axis.dim == d]
        split = after[to[0]] if to else None
        rows = max(axis.rows for axis, _ in axes)
        if split is not layer_split:
            sent += 2 * size
            continue
        ends = np.zeros(2)
        for axis, base in axes:
            ends = np.maximum(
                ends, _crossing(axis, base, split, source.aval.shape[d], shape[to[0]])
            )
        sent += ends.sum() * size / rows
    return sent


def _crossing(axis: Axis, base: int, split: Split, size: int, rows: int) -> list[float]:
    """The most rows that a tile needs of those before it and behind it."""
    tiles = np.arange(split.tiles)
    local, width = split.rows(rows), split.rows(size)
    low = np.maximum(-(-(tiles * local - axis.at) // axis.step), 0)
    high = np.minimum(-(-((tiles + 1) * local - axis.at) // axis.step), axis.rows)
    some = low < high
    if not some.any():
        return [0.0, 0.0]
    one, other = base + axis.stride * low, base + axis.stride * (high - 1)
    first, last = np.minimum(one, other), np.maximum(one, other)
    every = abs(axis.stride)
    needed = (tiles * width - first, last - (tiles + 1) * width + 1)
    return [float(np.clip(-(-n // every), 0, high - low)[some].max()) for n in needed]
