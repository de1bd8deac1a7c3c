"""The values of a body: who makes and reads them, and which are views of others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from gshard._jax import optimization_barrier_p
from gshard.forecast.ops import Op, size_of
from gshard.graph.kinds import ALIASES
from gshard.graph.source import source_of


@dataclass(eq=False)
class DeviceOperator:
    """What a device runs as one: an unfused op, or a fused group that ends in `root`."""

    root: Op
    reads: list[Any]
    writes: list[Any]
    members: list[Op] = field(default_factory=list)
    loop: LoopBodies | None = None  # of a loop or branch

    @property
    def bytes(self) -> int:
        """What it reads and writes, each stored value once; of a view only what it shows."""
        reads = dict.fromkeys(self.root.reads) if len(self.members) == 1 else self.reads
        return sum(map(size_of, reads)) + sum(map(size_of, self.writes))

    @property
    def source(self) -> str:
        """The user's line."""
        return source_of(self.root.eqn)

    @property
    def site(self) -> JaxprEqn:
        """The first member with a line of user code, else the root."""
        eqns = (op.eqn for op in self.members)
        return next((e for e in eqns if source_of(e) != "unknown"), self.root.eqn)

    @property
    def value(self) -> Any:
        """The first result; of a copy that a compiler adds, what is copied."""
        values = self.reads if self.root.added else self.writes
        return values[0] if values else None


@dataclass(frozen=True)
class LoopBodies:
    """What a loop or branch runs, and how often; as for balanced data if that depends on data.

    Where a schedule chooses branches, the slowest that any device is in counts in every tick.
    `scan` has the numbers of a scan's constants and carries. `copies` are operators of each run
    that a compiler adds.
    """

    bodies: list[Body]
    runs: list[Fraction]  # of each body, for each of the loop
    scan: tuple[int, int] | None
    copies: list[DeviceOperator]


Walked = tuple[DeviceOperator, int, tuple[JaxprEqn, ...]]  # its number of runs, and loops around it


@dataclass(eq=False)
class Body:
    """The operators of one program or loop body, in its order."""

    jaxpr: Jaxpr
    inputs: list[Any]
    outputs: list[Any]
    operators: list[DeviceOperator]
    alias: dict[Any, Any]  # values that are another one under a new shape
    folded: set[Any]  # of those what a product does on the way

    def stands_for(self, var: Any) -> Any:
        """The stored value of which `var` is a view."""
        while var in self.alias:
            var = self.alias[var]
        return var

    def walk(self, times: int = 1, around: tuple[JaxprEqn, ...] = ()) -> Iterator[Walked]:
        """Every operator with its number of runs and its enclosing loops, bodies before their loop.

        All branches of a conditional are counted, as in the list of collectives.
        """
        for operator in self.operators:
            if operator.loop is None:
                if operator.root.primitive is not optimization_barrier_p:  # an order, not a kernel
                    yield operator, times, around
                continue
            inside = (*around, operator.root.eqn)
            for body, runs in zip(operator.loop.bodies, operator.loop.runs, strict=True):
                yield from body.walk(int(times * runs), inside)
            for copy in operator.loop.copies:
                yield copy, int(times * operator.loop.runs[0]), inside


class Dataflow:
    """The equations of a body before they are fused.

    `folds` says which of them a product computes as it reads its operands or writes its result.
    """

    def __init__(
        self, ops: Sequence[Op], outputs: list[Any], folds: Callable[[Op, Dataflow], bool]
    ):
        self.ops = ops
        self.leaving = {v for v in outputs if not isinstance(v, Literal)}
        self.makers = {var: op for op in ops for var in op.writes}
        self.readers: dict[Any, list[Op]] = defaultdict(list)
        for op in ops:
            for var in op.reads:
                self.readers[var].append(op)
        self.folded = {v for op in ops if folds(op, self) for v in op.writes}
        self.alias = {
            new: old
            for op in ops
            if op.primitive in ALIASES or self.folded.intersection(op.writes)
            if len(op.reads) == len(op.writes)
            for new, old in zip(op.writes, op.reads, strict=True)
        }

    def stands_for(self, var: Any) -> Any:
        """The value of which `var` is a view."""
        while var in self.alias:
            var = self.alias[var]
        return var

    def is_view(self, op: Op) -> bool:
        """Whether it makes no value of its own."""
        return bool(op.writes) and op.writes[0] in self.alias

    def users(self, var: Any) -> list[Op]:
        """Who reads a value, through views of it."""
        users = []
        for op in self.readers[var]:
            views = [w for w in op.writes if self.alias.get(w) is var]
            users += [u for w in views for u in self.users(w)] if views else [op]
        return users

    def leaves(self, var: Any) -> bool:
        """Whether a value or a view of it leaves the body."""
        views = [w for op in self.readers[var] for w in op.writes if self.alias.get(w) is var]
        return var in self.leaving or any(map(self.leaves, views))
