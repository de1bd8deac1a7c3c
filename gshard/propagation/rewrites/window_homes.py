"""Where tensors between windows are computed: the rows of a large tensor that send the fewest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from gshard.graph.row_map import Axis, Layer
from gshard.tensors.sharding import Split


class Home(NamedTuple):
    """Rows of a small tensor are the rows from `first` on, `step` apart, of one of `size` rows."""

    size: int
    first: int
    step: int
    split: Split


class WindowUse(NamedTuple):
    """How `rows` rows of tensors are read from, and written to, windows of `size` rows."""

    dim: int
    rows: int
    size: int
    split: Split
    read: Sequence[Layer]
    placed: Sequence[Layer]
    others: int  # reads and writes of the small tensors themselves
    cut: Sequence[Layer]  # windows of the small tensors

    def home(self) -> Home | None:
        """Where the rows are computed so that the fewest rows are sent; None if as they are."""
        d, axes = self.dim, [layer.axes[self.dim] for layer in self.read]
        steps = rows_apart(self.read, self.placed, d)
        step = steps.pop() if steps else 1
        if steps or step < 1 or (step > 1 and any(a.rows < self.rows for a in axes)):
            return None
        if self.size < 4 * self.rows * step < 3 * self.size:  # halves are no borders
            return None
        starts = {(n.source, n.base[d] - a.at * step) for n, a in zip(self.read, axes, strict=True)}
        ends = {n.axes[d].at for n in self.placed}
        if self.rows > self.size:
            ends = {-n.base[d] for n in self.cut}
            if step > 1 or not all(n.axes[d].is_run for n in self.cut):
                return None
        options = {o for o in {first for _, first in starts} | ends if self._fits(o, step)}
        costs = {o: self._sent(starts, ends, o, step) for o in sorted(options)}
        if not costs:
            return None
        first = min(costs, key=lambda o: costs[o])
        farthest = max([abs(start - first) for _, start in starts], default=0)
        usual = self._usual(starts, ends, step)
        better = costs[first] < usual or (costs[first] == usual and bool(self.cut))
        if not better or farthest > self.split.rows(self.size):
            return None
        return Home(self.size, first, step, self.split)

    def _fits(self, first: int, step: int) -> bool:
        """Whether the large tensors have all rows that are read."""
        if self.rows <= self.size:
            return 0 <= first <= self.size - (self.rows - 1) * step - 1
        needed = [(n.base[self.dim], n.base[self.dim] + n.axes[self.dim].rows) for n in self.cut]
        return all(first + low >= 0 and first + high <= self.size for low, high in needed)

    def _sent(self, starts: set[tuple[Any, int]], ends: set[int], first: int, step: int) -> int:
        """Rows that are sent if the small tensors begin at the row `first` of the large ones."""
        shifts = {(source, start - first) for source, start in starts}
        moved = sum(abs(by) for _, by in shifts) + sum(abs(at - first) for at in ends)
        return moved + self.others * self._moved(first, step)

    def _usual(self, starts: set[tuple[Any, int]], ends: set[int], step: int) -> int:
        """Rows that are sent if the small tensors have tiles of their own."""
        if self.rows < self.split.tiles:  # they are replicated
            return 2 * self.rows * len(starts)
        return sum(self._moved(start, step) for _, start in starts) + sum(
            self._moved(at, step) for at in ends
        )

    def _moved(self, first: int, step: int) -> int:
        """Rows between tiles of the large tensor and those of its rows from `first` on."""
        if self.rows < self.split.tiles:
            return 2 * self.rows
        last = self.split.tiles - 1
        off = self.split.rows(self.rows) * step - self.split.rows(self.size)
        return max(abs(first), abs(first + last * off)) // step


def rows_apart(read: Sequence[Layer], placed: Sequence[Layer], dim: int) -> set[int]:
    """How far apart the rows are that are read, and those that are written."""
    found = {n.axes[dim].stride for n in read if n.axes[dim].rows > 1}
    return found | {n.axes[dim].step for n in placed if n.axes[dim].rows > 1}


def thinned(layer: Layer, dim: int) -> Layer:
    """A layer of every so many rows as one of neighbours, between tensors of only those rows."""
    axis = layer.axes[dim]
    if axis.dim is None:
        return layer
    thin = Axis(axis.at // axis.step, axis.rows, axis.dim)
    return layer.along(dim, thin, layer.base[dim] // axis.stride)
