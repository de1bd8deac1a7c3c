"""`Rule`: the description of a primitive, read by propagation and by the planner.

Most operators are described by their `Factors` alone; the others add a partition rule of their own.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive

from gshard.graph.evaluate import bind
from gshard.graph.reason import Reason
from gshard.tensors.devices import Place
from gshard.tensors.factors import Factor, Factors, Shape
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import Tile


@dataclass(frozen=True)
class Shares:
    """The costs that an operator shares with others.

    `of_sum` is its part of the cost of reducing its result, where unreduced values are added first.
    `uses` is for each operand the part of a reshard that this use pays, `narrow` the part of its
    bytes that have to move (see `uses`), and `moved` the shardings under which it is already
    available, which cost nothing.
    """

    of_sum: float
    uses: tuple[float, ...]
    narrow: tuple[float, ...]
    moved: tuple[frozenset[Sharding], ...]

    def of_move(self, number: int, target: Sharding) -> float:
        """The part to pay for resharding an operand to `target`."""
        return 0.0 if target in self.moved[number] else self.uses[number]


class Way(NamedTuple):
    """One way to run an operator: the shardings that it takes and gives, and what it costs.

    `results` are unreduced where partial results are left, to be combined by `kind`. `work` is the
    time of the local work, and `sent` what the operator sends inside, both in bytes
    (`moving.costs`). `how` is for the rule that runs it.
    """

    operands: tuple[Sharding, ...]
    results: tuple[Sharding, ...]
    how: Any = None
    kind: str = ""
    work: float = 0.0
    sent: float = 0.0


class Context(Protocol):
    """The planner, as partition rules see it."""

    place: Place
    memory_limit: int
    values: dict[Any, Tile]  # of the variables of the last program or body
    unreduced: Mapping[Any, float]  # variables that may stay so; share of the reduction to pay

    def reshard(self, tile: Tile, target: Sharding, reason: Reason) -> Tile:
        """`tile` under another sharding; a repeated request moves nothing."""
        ...

    def retile(self, tile: Tile, dim: int, size: int, reason: Reason) -> Tile:
        """`tile` with tiles of `size` rows along `dim`, which may differ from the sharding's."""
        ...

    def stays_unreduced(self, var: Any, tile: Tile, kind: str) -> bool:
        """Whether `tile`, a value of `var` that is to be reduced by `kind`, is reduced later."""
        ...

    def cheapest(
        self, eqn: JaxprEqn, rule: Rule, tiles: Sequence[Tile], targets: Sequence[Sharding]
    ) -> Way:
        """The cheapest way to run `eqn` on `tiles`."""
        ...

    def readers(self, var: Any) -> Sequence[JaxprEqn]:
        """The equations that read a variable."""
        ...

    def over_slices(self, var: Any, alike: Any, cost: Callable[[JaxprEqn], float]) -> float:
        """The cost of all slices of a variable; those that are `alike` are computed once."""
        ...

    def inner(self) -> Context:
        """A context for the body of a loop or branch, whose values may not leave it."""
        ...

    def run_body(
        self, closed: Any, tiles: Sequence[Tile], leaving: Mapping[int, float] = ...
    ) -> list[Tile]:
        """Partition the body of a loop or branch, called with `tiles`.

        The results with the numbers in `leaving` may be unreduced (`uses`).
        """
        ...

    def on(self, place: Place, shardings: Mapping[Any, Sharding]) -> Context:
        """A context for other devices and another program."""
        ...

    def run(self, jaxpr: Any, tiles: Sequence[Tile]) -> list[Tile]:
        """The results of a program, given tiles for its arguments."""
        ...

    def sharding(self, var: Any) -> Sharding:
        """The sharding that propagation gave a variable."""
        ...


LocalOp = Callable[[Context, JaxprEqn, list[Tile], list[Shape]], Sequence[jax.Array]]
PartitionRule = Callable[[Context, JaxprEqn, list[Tile], list[Sharding]], list[Tile]]
RunWay = Callable[[Context, JaxprEqn, Way, list[Tile], list[Sharding]], list[Tile]]
UnreducedRule = Callable[[Context, JaxprEqn, Sequence[Tile]], Tile | None]
Work = Callable[[Mapping[Factor, int]], float]
Linear = Callable[[JaxprEqn], Sequence[Sequence[int]]]
# From an equation, the shardings of its operands, those wanted of its results, and the memory limit
Ways = Callable[[JaxprEqn, Sequence[Sharding], Sequence[Sharding], int], Iterable[Way]]


def linear_in(*groups: Sequence[int]) -> Linear:
    """Linear in the operands of each group jointly, while all others are fixed.

    A sum is `linear_in((0, 1))`, a product `linear_in((0,), (1,))`.
    """
    return lambda eqn: groups


def linear_in_all(eqn: JaxprEqn) -> Sequence[Sequence[int]]:
    """Linear in all operands jointly."""
    return (range(len(eqn.invars)),)


def bind_local(
    ctx: Context, eqn: JaxprEqn, tiles: list[Tile], shapes: list[Shape]
) -> Sequence[jax.Array]:
    """The primitive itself, on local arrays."""
    return bind(eqn, [t.array for t in tiles])


def cheapest(
    ctx: Context, eqn: JaxprEqn, rule: Rule, tiles: Sequence[Tile], targets: Sequence[Sharding]
) -> Way:
    """The cheapest way to run `eqn` on `tiles`, found once for equal equations."""
    return ctx.cheapest(eqn, rule, tiles, targets)


def in_cheapest_way(run: RunWay) -> PartitionRule:
    """Partition by taking the cheapest way: `run` gets the operands under its shardings."""

    @functools.wraps(run)
    def partition(
        ctx: Context, eqn: JaxprEqn, tiles: list[Tile], targets: list[Sharding]
    ) -> list[Tile]:
        way = ctx.cheapest(eqn, RULES[eqn.primitive], tiles, targets)
        reason = Reason("operand", eqn.primitive.name)
        ready = [ctx.reshard(t, here, reason) for t, here in zip(tiles, way.operands, strict=True)]
        return run(ctx, eqn, way, ready, targets)

    return partition


def partition_by_factors(
    ctx: Context,
    eqn: JaxprEqn,
    tiles: list[Tile],
    targets: list[Sharding],
    rule: Rule | None = None,
) -> list[Tile]:
    """An operator under the cheapest split of its factors; results may still need resharding."""
    rule = rule or RULES[eqn.primitive]
    return ctx.cheapest(eqn, rule, tiles, targets).how.run(ctx, eqn, rule.local, tiles, targets)


@dataclass(frozen=True)
class Doc:
    """An operator's row in docs/reference/operators.md: which dims split how, and what it sends."""

    free: str = ""
    halo: str = ""  # by halo exchange or CollectivePermutes
    gather: str = ""  # by collectives over all tiles of a dim
    refused: str = ""  # why it cannot be split at all


@dataclass(frozen=True)
class Rule:
    """How a primitive's dims relate, and how it runs on tiles.

    `partition` runs it: it gets the operands under their current shardings and the wanted shardings
    of the results, and may return others. By default it takes the cheapest split of the factors,
    and `local` computes the results from tiles whose dims are split like that. `ways` lists the
    alternatives, where they are not just the splits of the factors. `level` orders propagation: 0
    before 1. `work` counts the floating-point operations on factors of given local sizes, for
    operators that compute for longer than they read and write memory. `linear` gives the operands
    that the operator is linear in: it can run on unreduced ones, and its result is then unreduced
    too; `on_unreduced` is how, where not simply in place (None where that needs sums after all).
    `ordered` gives the factors whose rows the operator tells apart by their number, as a cumulative
    sum does; a rule with a `partition` of its own that does not say so may do that for all. Each
    element of an `elementwise` one depends on the operands' elements in its place alone. `doc` is
    the operator's row in docs/reference/operators.md.
    """

    factors: Callable[[JaxprEqn], Factors]
    local: LocalOp = bind_local
    partition: PartitionRule = partition_by_factors
    ways: Ways | None = None
    level: int = 1
    work: Work | None = None
    linear: Linear | None = None
    ordered: Callable[[JaxprEqn], Collection[Factor]] | None = None
    doc: Doc = Doc()
    on_unreduced: UnreducedRule | None = None
    elementwise: bool = False

    @property
    def by_factors(self) -> bool:
        """Whether it always runs under a split of its factors, without a `partition` of its own."""
        return self.partition is partition_by_factors


RULES: dict[Primitive, Rule] = {}


def equation_key(eqn: JaxprEqn) -> int | None:
    """A key that is equal for equations that differ only in their variables, as in repeated layers.

    None if a parameter is not hashable, or for equations with bodies.
    """
    described: list[Any] = [eqn.primitive, *eqn.params.items()]
    for atom in (*eqn.invars, *eqn.outvars):
        aval = atom.aval
        described += (aval.shape, aval.dtype, str(atom.val) if isinstance(atom, Literal) else None)
    key = tuple(described)
    try:
        number = _numbers.get(key)
    except TypeError:  # a parameter that cannot be hashed
        return None
    if number is None and not any(map(_holds_program, eqn.params.values())):
        if len(_numbers) > MOST_REMEMBERED:
            _numbers.clear()
        number = _numbers[key] = next(_unused)
    return number


_numbers: dict[Any, int] = {}  # of kinds of equations
_unused = itertools.count()


def _holds_program(param: Any) -> bool:
    if isinstance(param, tuple):
        return any(map(_holds_program, param))
    return isinstance(param, (Jaxpr, ClosedJaxpr))


_described: dict[Any, Factors] = {}


def factors_of(rule: Rule, eqn: JaxprEqn, key: int | None = None) -> Factors:
    """The factors of an equation, computed once for equal equations."""
    key = equation_key(eqn) if key is None else key
    if key is None:
        return rule.factors(eqn)
    found = _described.get((rule.factors, key))
    if found is None:
        if len(_described) > MOST_REMEMBERED:
            _described.clear()
        found = _described[rule.factors, key] = rule.factors(eqn)
    return found


def rowwise(eqn: JaxprEqn, factor: Factor) -> bool:
    """Whether each row of the results along `factor` depends on that row of the operands only.

    Such an operator runs on any rows in any order, so also on tiles that are ragged.
    """
    rule = RULES.get(eqn.primitive)
    if rule is None or (rule.ordered is None and not (rule.by_factors and rule.ways is None)):
        return False
    factors = factors_of(rule, eqn)
    if factor in {*factors.reduced, *factors.replicated, *factors.resized}:
        return False
    if rule.ordered and factor in rule.ordered(eqn):
        return False
    tensors = [[d for d in t if factor in d] for t in (*factors.operands, *factors.results)]
    in_results = any(factor in d for t in factors.results for d in t)
    return in_results and all(found in ([], [(factor,)]) for found in tensors)


def no_order(eqn: JaxprEqn) -> Collection[Factor]:
    """For a rule's `ordered`: the result does not depend on the position of rows of any factor."""
    return ()


MOST_REMEMBERED = 16384  # cached kinds of equations


def register(rule: Rule, *primitives: Primitive) -> None:
    """Make `rule` the rule of `primitives`; each has exactly one."""
    for primitive in primitives:
        assert primitive not in RULES, primitive
        RULES[primitive] = rule
