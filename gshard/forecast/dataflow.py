"""The equations of a body, with calls inlined, and the operators that a compiler makes of them."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive
from jax.extend.core import primitives as p

from gshard._jax import optimization_barrier_p
from gshard.graph.kinds import ALIASES, APART, PRODUCTS, REDUCTIONS
from gshard.graph.regions import LOOPS, Stored, with_calls_inlined
from gshard.graph.source import source_of
from gshard.moving.inventory import transfers
from gshard.tensors.tile import size_of

_ALONE = {*APART, *PRODUCTS, *LOOPS}  # never fused, like collectives
_IN_PLACE = {p.dynamic_update_slice_p, p.select_and_scatter_add_p, p.scan_p, p.while_p}


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
    def is_view(self) -> bool:
        """Whether it computes nothing: a product with one, as of a gradient, neither."""
        ones = (isinstance(a, Literal) and a.val == 1 for a in self.eqn.invars)
        return self.primitive in ALIASES or (self.primitive is p.mul_p and any(ones))

    @property
    def reduces(self) -> bool:
        """Whether it is fused with its producers but not with its consumers."""
        return self.primitive in REDUCTIONS and self.joins and not self.by_rows


def elements(var: Any) -> int:
    """How many numbers a value has."""
    return math.prod(getattr(var.aval, "shape", ()))


Equations = tuple[list[Op], list[Any]]  # of a body, and the results' variables


def inlined(jaxpr: Jaxpr) -> Equations:
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
    def overwrites(self) -> bool:
        """Whether its results may take the buffers of operands that nothing reads afterwards."""
        aliases = bool(self.root.eqn.params.get("input_output_aliases"))  # of a kernel
        return self.root.joins or self.root.primitive in _IN_PLACE or aliases

    @property
    def carried(self) -> list[tuple[Any, Any]]:
        """What a loop starts with, and ends with, where it starts with a variable."""
        if self.loop is None or self.root.primitive is p.cond_p:
            return []
        reads, eqn = iter(self.root.reads), self.root.eqn
        given = [None if isinstance(v, Literal) else next(reads, None) for v in eqn.invars]
        first, count = self.loop.scan or (-len(self.writes), None)
        pairs = zip(given[first:], self.writes[:count], strict=False)
        return [(old, new) for old, new in pairs if old is not None]

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


def copied(eqn: JaxprEqn, var: Any) -> DeviceOperator:
    """A copy of `var` that a compiler adds for `eqn`."""
    op = Op(eqn, (var,), (Stored(var.aval),), False, p.copy_p)
    return DeviceOperator(op, [var], list(op.writes), [op])


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

    @functools.cached_property
    def makers(self) -> dict[Any, DeviceOperator]:
        """The operator that writes each value."""
        return {v: o for o in self.operators for v in o.writes}

    @functools.cached_property
    def readers(self) -> dict[Any, list[DeviceOperator]]:
        """The operators that read each value, each once."""
        found: dict[Any, list[DeviceOperator]] = {}
        for operator in self.operators:
            for var in dict.fromkeys(operator.reads):
                found.setdefault(var, []).append(operator)
        return found

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
            yield from ((copy, times, around) for copy in self._again(operator))
            counts = [int(times * runs) for runs in (loop.own if own else loop.runs)]
            for body, count in zip(loop.bodies, counts, strict=True):
                yield from body.walk(count, inside, own)
            for copy in loop.copies:
                yield copy, counts[0], inside

    def _again(self, loop: DeviceOperator) -> list[DeviceOperator]:
        """Copies of what a loop carries more than once: each time in a buffer of its own."""
        times = Counter(self.stands_for(old) for old, _ in loop.carried)
        return [copied(loop.root.eqn, var) for var, n in times.items() for _ in range(1, n)]
