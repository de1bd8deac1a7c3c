"""`Rule`: the description of a primitive, read by propagation and by the planner.

A rule is factors, ways and local: how the dims of operands and results correspond, in which ways
the operator can run, and what a device computes. Most operators are described by their `Factors`
alone. Loops, branches and manual regions are a `RegionRule`: it runs on tiles as they are.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive

from gshard.graph.evaluate import bind
from gshard.graph.reason import Reason
from gshard.graph.regions import Loop
from gshard.tensors.devices import Place
from gshard.tensors.factors import Factor, Factors, Shape, all_dims
from gshard.tensors.sharding import Sharding, Shardings, Targets
from gshard.tensors.tile import Arrays, Tile, Tiles


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


class Carried(NamedTuple):
    """The values that a loop carries unreduced, by number: under which shardings, left by what.

    Results of its body with the numbers in `sums` may be unreduced, and pay that share.
    """

    forms: Mapping[int, Sharding]
    origins: Mapping[int, str]
    sums: Mapping[int, float]


class Context(Protocol):
    """The planner, as partition rules see it."""

    place: Place
    memory_limit: int
    unreduced: Mapping[Any, float]  # variables that may stay so; share of the reduction to pay
    control: Any  # `scan`, `while_loop`, `switch` and `platform_dependent` of `jax.lax`
    rows: dict[Any, Any]  # what is read of tensors by all their row maps

    def reshard(self, tile: Tile, target: Sharding, reason: Reason) -> Tile:
        """`tile` under another sharding; a repeated request moves nothing."""
        ...

    def retile(self, tile: Tile, sizes: Sequence[int], reason: Reason) -> Tile:
        """`tile` with tiles of these sizes, which may differ from the sharding's."""
        ...

    def stays_unreduced(self, var: Any, tile: Tile, kind: str) -> bool:
        """Whether `tile`, a value of `var` that is to be reduced by `kind`, is reduced later."""
        ...

    def cheapest(self, eqn: JaxprEqn, rule: Rule, tiles: Tiles, targets: Targets) -> Way:
        """The way to run `eqn` on `tiles`, the cheapest."""
        ...

    def results(self, eqn: JaxprEqn, rule: Rule, way: Way, tiles: Tiles, targets: Targets) -> Tiles:
        """What `eqn` makes of `tiles` in this way."""
        ...

    def readers(self, var: Any) -> Sequence[JaxprEqn]:
        """The equations that read a variable."""
        ...

    def inner(self) -> Context:
        """A context for the body of a loop or branch, whose values may not leave it."""
        ...

    def carried(self, scan: Loop) -> Carried:
        """The values that a loop carries unreduced."""
        ...

    def run_body(
        self, closed: Any, tiles: Sequence[Tile], leaving: Mapping[int, float] = ...
    ) -> Tiles:
        """Partition the body of a loop or branch, called with `tiles`.

        The results with the numbers in `leaving` may be unreduced (`uses`).
        """
        ...

    def on(self, place: Place, shardings: Mapping[Any, Sharding]) -> Context:
        """A context for other devices and another program."""
        ...

    def run(self, jaxpr: Any, tiles: Sequence[Tile]) -> Tiles:
        """The results of a program, given tiles for its arguments."""
        ...

    def sharding(self, var: Any) -> Sharding:
        """The sharding that propagation gave a variable."""
        ...


LocalOp = Callable[[Context, JaxprEqn, Tiles, list[Shape]], Arrays]
PartitionRule = Callable[[Context, JaxprEqn, Tiles, list[Sharding]], Tiles]
RunWay = Callable[[Context, JaxprEqn, Way, Tiles, Targets], Tiles]
UnreducedRule = Callable[[Context, JaxprEqn, Sequence[Tile]], Tile | None]
Work = Callable[[Mapping[Factor, int]], float]
# From an equation, the shardings of its operands, those wanted of its results, and the memory limit
Ways = Callable[[JaxprEqn, Shardings, Targets, int], Iterable[Way]]


@dataclass(frozen=True)
class Linear:
    """The operands that an operator is linear in: those of each group jointly, others fixed.

    On unreduced ones its result is unreduced too. It runs in place, or by `run` (None where that
    needs sums after all).
    """

    groups: Callable[[JaxprEqn], Sequence[Sequence[int]]]
    run: UnreducedRule | None = None


def linear_in(*groups: Sequence[int], run: UnreducedRule | None = None) -> Linear:
    """A sum is `linear_in((0, 1))`, a product `linear_in((0,), (1,))`."""
    return Linear(lambda eqn: groups, run)


linear_in_all = Linear(lambda eqn: (range(len(eqn.invars)),))


def bind_local(ctx: Context, eqn: JaxprEqn, tiles: Tiles, shapes: list[Shape]) -> Arrays:
    """The primitive itself, on local arrays."""
    return bind(eqn, [t.array for t in tiles])


@dataclass(frozen=True)
class BindLocal:
    """The same, with the `params` that it has where results have these local shapes."""

    params: Callable[[JaxprEqn, Sequence[Shape]], Mapping[str, Any]]

    def __call__(self, ctx: Context, eqn: JaxprEqn, tiles: Tiles, shapes: list[Shape]) -> Arrays:
        """The local results."""
        return bind(eqn, [t.array for t in tiles], **self.params(eqn, shapes))


def cheapest(ctx: Context, eqn: JaxprEqn, rule: Rule, tiles: Tiles, targets: Targets) -> Way:
    """The cheapest way to run `eqn` on `tiles`, found once for equal equations."""
    return ctx.cheapest(eqn, rule, tiles, targets)


def on_moved(run: RunWay) -> RunWay:
    """`run` on operands under the shardings of the way."""

    @functools.wraps(run)
    def moved(ctx: Context, eqn: JaxprEqn, way: Way, tiles: Tiles, targets: Targets) -> Tiles:
        reason = Reason("operand", eqn.primitive.name)
        ready = [ctx.reshard(t, here, reason) for t, here in zip(tiles, way.operands, strict=True)]
        return run(ctx, eqn, way, ready, targets)

    return moved


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

    `ways` lists the ways to run it, by default every split of the factors; the planner takes the
    cheapest. `run` gets that way, the operands under their current shardings and the wanted
    shardings of the results, and may return others. By default, for ways that are splits of
    factors, `local` computes the results from tiles whose dims are split like that. `level` orders
    propagation: 0 before 1. `linear` gives the operands that the operator is linear in: it can run
    on unreduced ones. `doc` is the operator's row in docs/reference/operators.md.
    """

    factors: Callable[[JaxprEqn], Factors]
    local: LocalOp = bind_local
    ways: Ways | None = None
    run: RunWay | None = None
    level: int = 1
    linear: Linear | None = None
    doc: Doc = Doc()

    @property
    def by_factors(self) -> bool:
        """Whether it always runs under a split of its factors."""
        return self.ways is None and self.run is None

    def partition(self, ctx: Context, eqn: JaxprEqn, tiles: Tiles, targets: Targets) -> Tiles:
        """The operator in its cheapest way; results may still need resharding."""
        return ctx.results(eqn, self, ctx.cheapest(eqn, self, tiles, targets), tiles, targets)


@dataclass(frozen=True)
class Elementwise(Rule):
    """A rule of an operator whose elements depend on the operands' elements in their place."""

    factors: Callable[[JaxprEqn], Factors] = all_dims
    level: int = 0
    doc: Doc = Doc(free="every dim")


@dataclass(frozen=True)
class RegionRule:
    """An operator with bodies, or on the border of a manual region or inside: no split passes."""

    partition: PartitionRule
    doc: Doc = Doc()


Function = TypeVar("Function", bound=Callable[..., Any])
R = TypeVar("R")


class Registry(dict[Primitive, R]):
    """The rules of primitives, complete when the modules of rules are imported."""

    def add(self, rule: R, *primitives: Primitive) -> None:
        """Make `rule` the rule of `primitives`; each has exactly one."""
        for primitive in primitives:
            assert primitive not in self, primitive
            self[primitive] = rule


RULES, REGIONS = Registry[Rule](), Registry[RegionRule]()
register = RULES.add


def rule(*primitives: Primitive, **fields: Any) -> Callable[[Function], Function]:
    """Register a rule of which the decorated function is `run`, or `factors` if none are given.

    @rule(p.squeeze_p, level=0, doc=Doc(free="every dim"))
    def squeeze_factors(eqn): ...
    """

    def registered(function: Function) -> Function:
        own: dict[str, Any] = {"run" if "factors" in fields else "factors": function}
        register(Rule(**own, **fields), *primitives)
        return function

    return registered


def region(*primitives: Primitive, doc: Doc) -> Callable[[PartitionRule], PartitionRule]:
    """Register the decorated function as how `primitives` run."""

    def registered(partition: PartitionRule) -> PartitionRule:
        REGIONS.add(RegionRule(partition, doc), *primitives)
        return partition

    return registered


class EquationCache:
    """What was found for kinds of equations: those of repeated layers differ in variables only.

    A way in place uses every suggested split, so that it has the least work, and sends nothing:
    it is the cheapest whatever costs are. For speed only: it is emptied when it gets large.
    """

    def __init__(self, most: int = 16384):
        self.most = most
        self.numbers: dict[Any, int] = {}
        self.factors: dict[Any, Factors] = {}
        self.cheapest: dict[Any, Way] = {}
        self.in_place: dict[Any, tuple[Rule, Way]] = {}
        self.unused = itertools.count()

    def add(self, found: dict[Any, Any], key: Any, value: Any) -> None:
        """Remember a value in one of the dictionaries."""
        if len(found) > self.most:
            found.clear()
            self.in_place.clear()
        found[key] = value

    def key(self, eqn: JaxprEqn) -> int | None:
        """A number for the kind of an equation.

        None if a parameter is not hashable, or for equations with bodies.
        """
        described: list[Any] = [eqn.primitive, *eqn.params.items()]
        for atom in (*eqn.invars, *eqn.outvars):
            aval, literal = atom.aval, isinstance(atom, Literal)
            described += (aval.shape, aval.dtype, str(atom.val) if literal else None)
        key = tuple(described)
        try:
            number = self.numbers.get(key)
        except TypeError:  # a parameter that cannot be hashed
            return None
        if number is None and not any(map(_holds_program, eqn.params.values())):
            number = next(self.unused)
            self.add(self.numbers, key, number)
        return number


REMEMBERED = EquationCache()
equation_key = REMEMBERED.key


def _holds_program(param: Any) -> bool:
    if isinstance(param, tuple):
        return any(map(_holds_program, param))
    return isinstance(param, (Jaxpr, ClosedJaxpr))


def factors_of(rule: Rule, eqn: JaxprEqn, key: int | None = None) -> Factors:
    """The factors of an equation, computed once for equal equations."""
    key = equation_key(eqn) if key is None else key
    if key is None:
        return rule.factors(eqn)
    found = REMEMBERED.factors.get((rule.factors, key))
    if found is None:
        found = rule.factors(eqn)
        REMEMBERED.add(REMEMBERED.factors, (rule.factors, key), found)
    return found
