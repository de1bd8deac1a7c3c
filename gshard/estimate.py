"""What a program would cost under given shardings: the sum over its operators of what they send.

The same costs by which the partitioner chooses how an operator runs (`choose`), with trip counts.
A value that several operators need in one form is moved once. Layers that look alike are counted
once and multiplied.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Literal

from gshard.choose import choose, local_work, shard_dims
from gshard.flow import Edge, Flow
from gshard.moving.partial import combine_cost
from gshard.moving.plan import reshard_cost
from gshard.sharding import Sharding

Key = Any


class Operator(NamedTuple):
    """An operator of the program, or several that are alike."""

    kind: int  # equal where equal shardings cost the same
    variables: tuple[Any, ...]
    runs: int  # how often it runs
    edge: Edge
    fresh: tuple[bool, ...]  # which operands it is the first to use


class Estimator:
    """The cost of a program, for one assignment of shardings after another."""

    def __init__(self, flow: Flow):
        self.num_devices = flow.num_devices
        self.edges = flow.edges
        self.costs: dict[Key, float] = {}  # by kinds of operators, and shardings

    @functools.cached_property
    def operators(self) -> list[Operator]:
        """The operators of the program one by one."""
        found: list[Operator] = []
        numbers: dict[Key, int] = {}
        described: dict[Any, Key] = {}
        used: set[Any] = set()
        for edge in self.edges:
            operands = [a for a in edge.atoms[0] if not isinstance(a, Literal)]
            fresh = tuple([not isinstance(a, Literal) and a not in used for a in edge.atoms[0]])
            if edge.eqn is not None:
                used.update(operands)
            if edge.kind not in described:
                described[edge.kind] = _described(edge)
            kind = numbers.setdefault((described[edge.kind], fresh), len(numbers))
            variables = (*operands, *edge.atoms[1])
            found.append(Operator(kind, variables, edge.runs, edge, fresh))
        return found

    def alike(self, classes: Mapping[Any, Key]) -> list[Operator]:
        """The operators of a program in which all variables of a class have one sharding."""
        groups: dict[Key, list[Operator]] = {}
        for each in self.operators:
            key = (each.kind, *[classes[v] for v in each.variables])
            groups.setdefault(key, []).append(each)
        return [g[0]._replace(runs=sum(each.runs for each in g)) for g in groups.values()]

    def cost(
        self, shardings: Mapping[Any, Sharding], operators: Sequence[Operator] | None = None
    ) -> float:
        """The bytes that a device sends, and the time of its work as bytes."""
        total, costs = 0.0, self.costs
        for each in self.operators if operators is None else operators:
            key = (each.kind, *[shardings[v] for v in each.variables])
            cost = costs.get(key)
            if cost is None:
                cost = costs[key] = self._cost(each, shardings)
            total += cost * each.runs
        return total

    def _cost(self, operator: Operator, shardings: Mapping[Any, Sharding]) -> float:
        """What an operator costs when it runs once."""
        operands, results = (
            [
                Sharding.replicated(len(a.aval.shape), self.num_devices)
                if isinstance(a, Literal)
                else shardings[a]
                for a in side
            ]
            for side in operator.edge.atoms
        )
        return _edge_cost(operator.edge, operator.fresh, operands, results)


def _described(edge: Edge) -> Key:
    """All that the cost of an operator depends on, but for the shardings."""
    factors, eqn = edge.factors, edge.eqn
    avals = tuple((a.aval.shape, a.aval.dtype) for a in edge.atoms[0] + edge.atoms[1])
    return (
        eqn.primitive if eqn else None,
        avals,
        factors.operands,
        factors.results,
        tuple(factors.reduced.items()),
        factors.whole,
    )


def _edge_cost(
    edge: Edge, fresh: tuple[bool, ...], shardings: list[Sharding], targets: list[Sharding]
) -> float:
    factors, eqn = edge.factors, edge.eqn
    if eqn is None:  # the border of a loop
        (outside,), (inside,) = shardings, targets
        more = outside.rank - inside.rank
        wanted = Sharding((*(None,) * more, *inside.splits), inside.num_devices)
        (aval,) = (a.aval for a in edge.atoms[0])
        return reshard_cost(outside, wanted, aval.shape, aval.dtype)
    if not targets:
        return 0.0
    chosen = choose(eqn, factors, shardings, targets)
    total = local_work(eqn, factors, chosen)
    num_devices = targets[0].num_devices
    for atom, dims, here, first in zip(eqn.invars, factors.operands, shardings, fresh, strict=True):
        if first:
            wanted = shard_dims(dims, chosen, factors, num_devices)
            total += reshard_cost(here, wanted, atom.aval.shape, atom.aval.dtype)
    reduced = {f: s for f, s in chosen.items() if s and f in factors.reduced}
    for var, dims, target in zip(eqn.outvars, factors.results, targets, strict=True):
        here = shard_dims(dims, chosen, factors, num_devices)
        total += combine_cost(here, reduced, factors.reduced, target, var.aval)
    return total
