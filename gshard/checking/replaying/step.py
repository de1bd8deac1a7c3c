"""A step of a replay: one equation as one device runs it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from gshard.checking.tiles import Place, real
from gshard.graph.readable import size


@dataclass(frozen=True, eq=False)
class DeviceTile:
    """What a device has of a value: its tile, and where in the whole array that belongs.

    `array` is the tile, padding included. `shape` is that of the whole array and `place` the
    slices of it that the tile is; both are None for what an operator computes on the way, which
    is a part of no value of the user's program. An `unreduced` value's tile is a summand.
    """

    array: np.ndarray
    shape: tuple[int, ...] | None = None
    place: Place | None = None
    unreduced: bool = False

    @property
    def real(self) -> np.ndarray:
        """The tile without padding; all of it where it is not known what is padding."""
        return self.array if self.place is None else real(self.array, self.place)

    @functools.cached_property
    def range(self) -> str:
        """The least and the largest number, and how many are not finite."""
        values = self.real
        if values.size == 0 or (values.dtype.kind not in "iuf" and not _is_float(values.dtype)):
            return ""
        finite = values[np.isfinite(values)] if _is_float(values.dtype) else values
        odd = values.size - finite.size
        shown = f"{finite.min():.4g} to {finite.max():.4g}" if finite.size else "nothing finite"
        return f"{shown}, {odd:,} not finite" if odd else shown

    def __str__(self) -> str:
        kind = f"{self.array.dtype}{list(self.array.shape)}"
        if self.shape is None:
            return f"{kind} (of this device alone)"
        if self.place is None:
            return f"{kind} (this device holds no tile)"
        rows = ", ".join(f"{s.start}:{s.stop}" for s in self.place)
        summand = "a summand of " if self.unreduced else ""
        padding = self.array.size - self.real.size
        more = f", {padding:,} elements of padding" if padding else ""
        return f"{kind} = {summand}[{rows}] of {list(self.shape)}{more}"

    __repr__ = __str__


def _is_float(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


@dataclass(frozen=True, eq=False)
class Origin:
    """Where a value comes from: the equation that made it, and the origins of its operands."""

    operator: str
    source: str
    kind: str
    operands: tuple[Origin, ...] = ()

    def lines(self, depth: int, indent: str = "") -> list[str]:
        """The operators that led to a value, the latest first, `depth` of them deep."""
        found = [f"{indent}{self.kind} = {self.operator}  {self.source}"]
        if depth > 1:
            for origin in dict.fromkeys(self.operands):
                found += origin.lines(depth - 1, indent + "  ")
        return found


@dataclass(frozen=True, eq=False)
class ReplayStep:
    """One equation, as one `device` runs it.

    `runs` are the iteration numbers of the loops around it. `sent` and `received` have what a
    collective exchanges with which other device.
    """

    number: int
    operator: str
    source: str
    reason: str
    device: int
    runs: tuple[int, ...]
    operands: Sequence[DeviceTile]
    results: Sequence[DeviceTile]
    sent: dict[int, np.ndarray]
    received: dict[int, np.ndarray]
    origin: Origin
    found: str = ""  # what `until` found

    def history(self, depth: int = 6) -> str:
        """The operators that led to this step, the latest first, with their lines."""
        return "\n".join(self.origin.lines(depth))

    def __str__(self) -> str:
        where = "".join(f" run {n}" for n in self.runs)
        lines = [f"{self.number}{where} on device {self.device}: {self.operator}  {self.source}"]
        lines += [f"  {self.found}"] if self.found else []
        lines += [f"  because: {self.reason}"] if self.reason else []
        for title, pieces in (("operand", self.operands), ("result", self.results)):
            lines += [f"  {title} {p}" + (f": {p.range}" if p.range else "") for p in pieces]
        lines += [f"  {way} {text}" for way, text in self._exchanges()]
        return "\n".join(lines)

    __repr__ = __str__

    def _exchanges(self) -> list[tuple[str, str]]:
        found = []
        for way, arrays in (("sends to", self.sent), ("receives from", self.received)):
            if arrays:
                devices = ", ".join(map(str, arrays))
                total = sum(a.nbytes for a in arrays.values())
                found.append((way, f"device{'s' * (len(arrays) > 1)} {devices}: {size(total)}"))
        return found
