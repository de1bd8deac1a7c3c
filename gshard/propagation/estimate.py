"""The cost of a program under given shardings: the sum over its operators.

The costs are those by which the planner chooses how an operator runs (`choose`), times trip counts.
A value that several operators need under one sharding, or transposed, is moved once, and partial
sums that are added are reduced once. Equal layers are priced once and multiplied.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Literal
from jax.extend.core import primitives as p

from gshard.moving.plan import reshard_cost
from gshard.propagation.flow import Edge, Flow
from gshard.rules.base.rule import RULES, Shares
from gshard.rules.base.ways import by_factors, least, operand_moves, results_cost
from gshard.tensors.sharding import Sharding

Key = Any


class Operand(NamedTuple):
    """A use of a value; what was moved for `earlier` uses need not be moved again."""

    value: Any  # the variable, or the one that it is a transpose of
    dims: tuple[int, ...]  # for every dim of that variable, its dim here
    use: Key
    earlier: Collection[Key]


class Operator(NamedTuple):
    """An operator of the program, or several that are alike."""

    kind: int  # equal where equal shardings cost the same
    variables: tuple[Any, ...]
    runs: int  # how often it runs
    edge: Edge
    operands: Mapping[int, Operand]  # those that are variables
    share: float  # the part to pay of reducing its result
    narrow: tuple[float, ...]  # the part of each operand that has to move for it


class Cost(NamedTuple):
    """What an operator costs when it runs once."""

    work: float
    sent: float  # by itself, and for its results
    moves: Mapping[int, tuple[Sharding, float]]  # of operands: target, cost


class ProgramCost(NamedTuple):
    """What a program costs."""

    cost: float
    sent: float  # without the work

    def is_less_than(self, other: ProgramCost) -> bool:
        """Whether it is cheaper by more than a hundredth of what is sent, or else sends less.

        The work, most of which is the same, is far more: a hundredth of it hides what is sent.
        """
        margin = max(self.sent, other.sent) / 100
        if abs(self.cost - other.cost) <= margin:
            return self.sent < other.sent - margin
        return self.cost < other.cost


class Estimator:
    """Prices a program under one assignment of shardings after another."""

    def __init__(self, flow: Flow):
        self.num_devices = flow.num_devices
        self.memory_limit = flow.memory_limit
        self.edges = flow.edges
        self.shares = flow.shares
        self.narrow = flow.narrow
        self.costs: dict[Key, Cost] = {}  # by kinds of operators, and shardings

    @functools.cached_property
    def operators(self) -> list[Operator]:
        """The operators of the program one by one."""
        found: list[Operator] = []
        numbers: dict[Key, int] = {}
        sources: dict[Any, tuple[Any, tuple[int, ...]]] = {}  # of what is transposed
        for edge in self.edges:
            operands = {
                i: _operand(a, sources)
                for i, a in enumerate(edge.atoms[0])
                if not isinstance(a, Literal)
            }
            if edge.eqn is not None and edge.eqn.primitive is p.transpose_p and operands:
                order = edge.eqn.params["permutation"]
                dims = tuple([order.index(d) for d in operands[0].dims])
                sources[edge.eqn.outvars[0]] = (operands[0].value, dims)
            share = min([self.shares.get(v, 1.0) for v in edge.atoms[1]], default=1.0)
            narrow = tuple(
                [1.0 if isinstance(a, Literal) else self.narrow.get(a, 1.0) for a in edge.atoms[0]]
            )
            kind = numbers.setdefault((edge.kind, share, narrow), len(numbers))
            variables = (*[edge.atoms[0][i] for i in operands], *edge.atoms[1])
            found.append(Operator(kind, variables, edge.runs, edge, operands, share, narrow))
        return found

    def alike(self, classes: Mapping[Any, Key]) -> list[Operator]:
        """The operators of a program in which all variables of a class have one sharding.

        Equal operators are merged. Two are equal if they have the same kind and shapes, and their
        operands were used before by the same kinds of operators.
        """
        groups: dict[Key, list[Operator]] = {}
        numbers: dict[Key, int] = {}
        uses: dict[Any, frozenset[Key]] = {}  # of values, before
        for each in self.operators:
            key = (each.kind, *[classes[v] for v in each.variables])
            number = numbers.setdefault(key, len(numbers))
            operands = {}
            for i, operand in each.operands.items():
                earlier = uses.get(operand.value, frozenset())
                operands[i] = operand._replace(use=(number, i), earlier=earlier)
                if each.edge.eqn is not None:
                    uses[operand.value] = earlier | {(number, i)}
            key = (number, *[(o.dims, o.earlier) for o in operands.values()])
            groups.setdefault(key, []).append(each._replace(operands=operands))
        return [g[0]._replace(runs=sum(each.runs for each in g)) for g in groups.values()]

    def cost(
        self, shardings: Mapping[Any, Sharding], operators: Sequence[Operator] | None = None
    ) -> ProgramCost:
        """The bytes that a device sends, and the time of its work as bytes."""
        work, total, costs = 0.0, 0.0, self.costs
        moved: set[tuple[Key, Sharding]] = set()  # for which use, and to which sharding
        for each in self.operators if operators is None else operators:
            key = (each.kind, *[shardings[v] for v in each.variables])
            cost = costs.get(key)
            if cost is None:
                cost = costs[key] = self._cost(each, shardings)
            work += cost.work * each.runs
            spent = cost.sent
            for i, (target, sent) in cost.moves.items():
                _, dims, use, earlier = each.operands[i]
                form = target.project(dims)
                if not any((other, form) in moved for other in earlier):
                    spent += sent
                moved.add((use, form))
            total += spent * each.runs
        return ProgramCost(work + total, total)

    def _cost(self, operator: Operator, shardings: Mapping[Any, Sharding]) -> Cost:
        operands, results = (
            [
                Sharding.replicated(len(a.aval.shape), self.num_devices)
                if isinstance(a, Literal)
                else shardings[a]
                for a in side
            ]
            for side in operator.edge.atoms
        )
        return _edge_cost(operator, operands, results, self.memory_limit)


def _operand(var: Any, sources: Mapping[Any, tuple[Any, tuple[int, ...]]]) -> Operand:
    """A use of a value, identified by the value and not by the use."""
    value, dims = sources.get(var) or (var, tuple(range(len(var.aval.shape))))
    return Operand(value, dims, value, (value,))


def _edge_cost(
    operator: Operator, shardings: list[Sharding], targets: list[Sharding], memory_limit: int
) -> Cost:
    edge, share, narrow = operator.edge, operator.share, operator.narrow
    factors, eqn = edge.factors, edge.eqn
    if eqn is None:  # the border of a loop
        (outside,), (inside,) = shardings, targets
        more = outside.rank - inside.rank
        wanted = Sharding((*(None,) * more, *inside.splits), inside.num_devices)
        (aval,) = (a.aval for a in edge.atoms[0])
        return Cost(0.0, reshard_cost(outside, wanted, aval.shape, aval.dtype, narrow[0]), {})
    if not targets:
        return Cost(0.0, 0.0, {})
    count = len(shardings)
    shares = Shares(share, (1.0,) * count, narrow, (frozenset(),) * count)
    rule = RULES[eqn.primitive]
    ways = (
        rule.ways(eqn, shardings, targets, memory_limit)
        if rule.ways
        else by_factors(eqn, factors, shardings, targets)
    )
    way = least(ways, eqn, shardings, targets, shares)
    moves = {
        i: (wanted, sent) for i, wanted, sent in operand_moves(way, eqn, shardings, shares) if sent
    }
    return Cost(way.work, way.sent + results_cost(way, eqn, targets, shares), moves)
