"""What a check found: `Report`, and the `Difference`s in it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from gshard.checking.replaying.step import table
from gshard.graph.readable import counted

_SHOWN = 12  # rows of a table


@dataclass(frozen=True)
class Difference:
    """A value of the partitioned program that rounding does not explain.

    `what` is "result" for the operator's own result, else the reason of the reshard that moved it.
    `index` is the index in the global array of the element that differs most, `got` what `device`
    has there, `expected` what the operator gives on one device, and `bound` how far apart they may
    be. `runs` are the iteration numbers of the loops around it.
    """

    operator: str
    source: str
    what: str
    sharding: str
    shape: tuple[int, ...]
    dtype: str
    runs: tuple[int, ...]
    device: int
    index: tuple[int, ...]
    got: Any
    expected: Any
    bound: float
    elements: int  # how many differ

    def __str__(self) -> str:
        runs = "".join(f", run {n} of its loop" for n in self.runs)
        size = f"{self.dtype}{list(self.shape)}"
        return (
            f"{self.source}: {self.operator} ({self.what}{runs}), {size} {self.sharding}: "
            f"element {list(self.index)} is {self.got} on device {self.device}, and "
            f"{self.expected} unpartitioned; rounding explains {self.bound:.2g}. "
            f"{counted(self.elements, 'element')} differ"
        )


@dataclass
class Line:
    """The values of one operator at one line: how often compared, and the worst of them.

    `worst` is the largest difference in units of its bound: above 1 it is not explained.
    """

    operator: str
    source: str
    compared: int = 0
    different: int = 0
    worst: float = 0.0


@dataclass
class Report:
    """Whether every value of a program is what its operator gives unpartitioned.

    `differences` are in the order in which devices compute. Each operator is compared on the
    operands that the devices have, so that one fault is reported once. `not_compared` counts the
    values that were not compared, by reason.
    """

    name: str
    devices: int
    compared: int = 0
    differences: list[Difference] = field(default_factory=list)
    not_compared: Counter[str] = field(default_factory=Counter)
    lines: dict[tuple[str, str], Line] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    @property
    def first(self) -> Difference | None:
        """The first difference, in the order in which devices compute; None if there is none."""
        return self.differences[0] if self.differences else None

    @property
    def table(self) -> list[Line]:
        """A line for each operator and source line, those with the largest differences first."""
        return sorted(self.lines.values(), key=lambda line: -line.worst)

    def line(self, operator: str, source: str) -> Line:
        """The line of the table for an operator."""
        return self.lines.setdefault((operator, source), Line(operator, source))

    def __str__(self) -> str:
        values = f"{counted(self.compared, 'value')} of {self.name}"
        values += f" on {counted(self.devices, 'device')}"
        if self.ok:
            head = f"ok: {values} compared, all within what rounding explains"
        else:
            head = f"{len(self.differences)} of {values} differ. The first:\n  {self.first}"
        left = [f"not compared: {n:,} {why}" for why, n in self.not_compared.most_common()]
        rows = [
            f"  {line.worst:8.2g} x bound  {line.compared:6,} x  {line.operator:<22} {line.source}"
            for line in self.table[:_SHOWN]
        ]
        return "\n".join([head, *left, "largest differences, in units of their bounds:", *rows])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The first difference, and the table: how notebooks show it."""
        rows = [
            (line.operator, line.source, line.compared, line.different, f"{line.worst:.2g}")
            for line in self.table[:_SHOWN]
        ]
        head = f"ok, {self.compared:,} values" if self.ok else str(self.first)
        columns = ("operator", "source", "compared", "different", "worst / bound")
        return f"<p>{table((head,), ())}</p>{table(columns, rows)}"
