"""What a check found: `Report`, and the `Difference`s in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gshard.graph.readable import counted

_SHOWN = 12  # rows of a table


@dataclass(frozen=True)
class Difference:
    """A value of the partitioned program that is another one than that of the user's program.

    `what` is "result" for the operator's own result, else the reason of the reshard that moved it.
    `index` is the index in the global array of the first element that differs, `got` what `device`
    has there, and `expected` what it should be. Where these are equal as floats, the difference is
    below their rounding, or `why` names it. `runs` are the iteration numbers of the loops around.
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
    elements: int  # how many differ
    why: str = ""

    def __str__(self) -> str:
        runs = "".join(f", run {n} of its loop" for n in self.runs)
        size = f"{self.dtype}{list(self.shape)}"
        return (
            f"{self.source}: {self.operator} ({self.what}{runs}), {size} {self.sharding}: "
            f"element {list(self.index)} is {self.got} on device {self.device}, and "
            f"{self.expected} unpartitioned{self.why and ', ' + self.why}. "
            f"{counted(self.elements, 'element')} differ"
        )


@dataclass
class Line:
    """The values of one operator at one line: how often compared, and how many differ.

    `rounded` were compared within rounding, the others exactly.
    """

    operator: str
    source: str
    compared: int = 0
    different: int = 0
    rounded: int = 0


@dataclass(frozen=True)
class Covered:
    """How many comparisons of values were exact, and how many within rounding, by operator.

    `not_reached` counts values that exist in only one of the programs, by reason.
    """

    proved: int
    within_rounding: Mapping[str, int]
    not_reached: Mapping[str, int]

    @property
    def share(self) -> float:
        """The share of all comparisons that were exact."""
        return self.proved / max(self.proved + sum(self.within_rounding.values()), 1)


@dataclass
class Report:
    """Whether every value that the devices have is that of the user's program.

    `differences` are in the order in which devices compute. From each of them on, the check goes on
    with the right value, so that none follows from an earlier one. `not_compared` counts the values
    that exist in only one of the programs, by reason.
    `near_ties` counts decisions by floats that rounding could change, for which another point was
    drawn. Where sizes were reduced, `sizes` has them, and `same_plan` says whether the program for
    these sends the same collectives, at the same lines.
    """

    name: str
    devices: int
    differences: list[Difference] = field(default_factory=list)
    not_compared: Counter[str] = field(default_factory=Counter)
    lines: dict[tuple[str, str], Line] = field(default_factory=dict)
    degree: float = 1.0
    near_ties: int = 0
    sizes: Mapping[int, int] = field(default_factory=dict)
    same_plan: bool = True

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    @property
    def exact(self) -> bool:
        """Whether nothing differs, and nothing was compared within rounding."""
        return self.ok and not self.covered.within_rounding

    @property
    def error_probability(self) -> float:
        """At most how likely it is that an element that differs was not noticed.

        Polynomials of this degree agree at a random point so often, at most (Schwartz-Zippel).
        """
        return min(1.0, (1 + self.degree) / (2.0**61 - 1))

    @property
    def compared(self) -> int:
        """How many values were compared."""
        return sum(line.compared for line in self.lines.values())

    @property
    def covered(self) -> Covered:
        """What was proved, what was compared within rounding, and what was not reached."""
        rounded: Counter[str] = Counter()
        for line in self.lines.values():
            rounded[line.operator] += line.rounded
        others = sum(line.rounded + line.different for line in self.lines.values())
        return Covered(self.compared - others, dict(+rounded), dict(self.not_compared))

    @property
    def first(self) -> Difference | None:
        """The first difference, in the order in which devices compute; None if there is none."""
        return self.differences[0] if self.differences else None

    @property
    def table(self) -> list[Line]:
        """A line for each operator and source line, those that differ most often first."""
        return sorted(self.lines.values(), key=lambda line: (-line.different, -line.rounded))

    def line(self, operator: str, source: str) -> Line:
        """The line of the table for an operator."""
        return self.lines.setdefault((operator, source), Line(operator, source))

    def __str__(self) -> str:
        values = f"{counted(self.compared, 'value')} of {self.name}"
        values += f" on {counted(self.devices, 'device')}"
        covered = self.covered
        if self.exact:
            chance = f"the probability of an error is below {self.error_probability:.1g}"
            head = f"ok: {values}, all equal exactly; {chance}"
        elif self.ok:
            names = ", ".join(f"{n:,} of {k}" for k, n in covered.within_rounding.items())
            head = f"ok: {values}, {covered.proved:,} equal exactly, within rounding {names}"
        else:
            head = f"{len(self.differences)} of {values} differ. The first:\n  {self.first}"
        more = [f"not compared: {n:,} {why}" for why, n in self.not_compared.most_common()]
        if self.sizes:
            taken = ", ".join(f"{new:,} for {old:,}" for old, new in self.sizes.items())
            plan = "the same plan" if self.same_plan else "a plan with other collectives"
            more.append(f"sizes were reduced, with {plan}: {taken}")
        if self.near_ties:
            more.append(f"another point was drawn for {counted(self.near_ties, 'near tie')}")
        named = [line for line in self.table if line.different or (self.ok and line.rounded)]
        rows = [
            f"  {line.different or line.rounded:6,} x  {line.operator:<22} {line.source}"
            for line in named[:_SHOWN]
        ]
        title = "within rounding:" if self.ok else "the operators with most differences:"
        return "\n".join([head, *more, *([title, *rows] if rows else [])])

    __repr__ = __str__
