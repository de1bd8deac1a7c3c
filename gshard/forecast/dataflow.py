"""The operators of a body, with calls inlined, and its values: who makes and reads them, and which
are views of others. It is the input of the models of compilers, and what they make of it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive

from gshard._jax import optimization_barrier_p
from gshard.graph.kinds import ALIASES, APART, PRODUCTS, REDUCTIONS
from gshard.graph.regions import LOOPS, with_calls_inlined
from gshard.graph.source import source_of
from gshard.moving.inventory import transfers
from gshard.tensors.tile import byte_size

_ALONE = {*APART, *PRODUCTS, *LOOPS}  # never fused, like collectives


@dataclass(frozen=True, eq=False)
class Op:
    """An equation of a body, calls inlined; `reads` are variables, literals left out."""

    eqn: JaxprEqn
    reads: tuple[Any, ...]
    writes: tuple[Any, ...]
    joins: bool  # whether a compiler fuses it with its neighbours
    added: Primitive | None = None  # if a compiler adds it
    by_rows: bool = False  # a reduction that is fused with its consumers too

    @property
    def primitive(self) -> Primitive:
        """The equation's, or what a compiler adds for it."""
        return self.added or self.eqn.primitive

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.primitive.name

    @property
    def reduces(self) -> bool:
        """Whether it is fused with its producers but not with its consumers."""
        return self.primitive in REDUCTIONS and self.joins and not self.by_rows


def size_of(var: Any) -> int:
    """Bytes of a value."""
    aval = var.aval
    return byte_size(aval.shape, aval.dtype) if hasattr(aval, "shape") else 0


def elements(var: Any) -> int:
    """How many numbers a value has."""
    return math.prod(getattr(var.aval, "shape", ()))


def inlined(jaxpr: Jaxpr) -> tuple[list[Op], list[Any]]:
    """The equations with calls inlined, and the results' variables."""
    steps, outputs = with_calls_inlined(jaxpr)
    ops = []
    for eqn, operands, results in steps:
        reads = tuple(r for r in operands if not isinstance(r, Literal))
        joins = eqn.primitive not in _ALONE and not transfers(eqn)
        ops.append(Op(eqn, reads, results, joins))
    return ops, outputs


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

    Where a schedule chooses branches, the slowest that any device is in counts in every tick;
    `own` are the runs of one device. `scan` has the numbers of a scan's constants and carries.
    `copies` are operators of each run that a compiler adds.
    """

    bodies: list[Body]
    runs: list[Fraction]  # of each body, for each of the loop
    own: list[Fraction]
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

    def walk(
        self, times: int = 1, around: tuple[JaxprEqn, ...] = (), own: bool = False
    ) -> Iterator[Walked]:
        """Every operator with its number of runs and its enclosing loops, bodies before their loop.

        All branches of a conditional are counted, as in the list of collectives. The runs are those
        that a step waits for, or one device's `own`.
        """
        for operator in self.operators:
            if operator.loop is None:
                if operator.root.primitive is not optimization_barrier_p:  # an order, not a kernel
                    yield operator, times, around
                continue
            inside, loop = (*around, operator.root.eqn), operator.loop
            counts = [int(times * runs) for runs in (loop.own if own else loop.runs)]
            for body, count in zip(loop.bodies, counts, strict=True):
                yield from body.walk(count, inside, own)
            for copy in loop.copies:
                yield copy, counts[0], inside


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
