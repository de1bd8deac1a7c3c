"""The ways to run an operator, and the cost of each.

A `Way` says under which shardings an operator takes its operands, which it gives its results, and
what it costs by itself: the local work, and the bytes that it sends inside (a halo, a columnsort).
Most operators are described by factors: every split of those is a way (`by_factors`). Other rules
list their own (`Rule.ways`). The planner (`choose`) and the ranking of conflicting splits
(`propagation.flow`) read these ways, and `price` is the one place where they are priced: what
is sent to reshard operands, to combine partial results and to reshard results as wanted is added to
the way's own cost (section 3.3.2, "Einsum Case Study"). Automatic annotation
(`autosharding.cost`) adds what the cheapest of a rule's own ways sends to its strategies.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.extend.core import JaxprEqn

from gshard._jax import copied
from gshard.graph.reason import Reason
from gshard.moving.costs import worked
from gshard.moving.partial import combine, combine_cost
from gshard.moving.plan import reshard_cost
from gshard.moving.reductions import mask_for
from gshard.rules.base.rule import (
    BindLocal,
    Context,
    LocalOp,
    Rule,
    Shares,
    Way,
    Work,
    bind_local,
    factors_of,
)
from gshard.tensors.factors import (
    Assignment,
    Factor,
    Factors,
    assignments,
    local_dims,
    shard_dims,
    shard_result,
)
from gshard.tensors.sharding import Sharding, Shardings, Targets
from gshard.tensors.tile import Tile, Tiles, itemsize_of, local_type


def ways_of(
    rule: Rule, eqn: JaxprEqn, shardings: Shardings, targets: Targets, memory_limit: int
) -> Iterable[Way]:
    """The ways to run `eqn`, of operands with these shardings, for results that have `targets`."""
    if rule.ways:
        return rule.ways(eqn, shardings, targets, memory_limit)
    return by_factors(eqn, factors_of(rule, eqn), shardings, targets)


def least(
    ways: Iterable[Way],
    eqn: JaxprEqn,
    shardings: Shardings,
    targets: Targets,
    shares: Shares | None = None,
) -> Way:
    """The cheapest way, the first of equal ones; a single one is not priced."""
    found, *others = ways
    cost = math.inf
    for way in (found, *others) if others else ():
        total = price(way, eqn, shardings, targets, shares, cost)
        if total < cost:
            found, cost = way, total
    return found


def price(
    way: Way,
    eqn: JaxprEqn,
    shardings: Shardings,
    targets: Targets,
    shares: Shares | None = None,
    limit: float = math.inf,
) -> float:
    """The cost of a way with all that is moved for it; what exceeds `limit` may be incomplete.

    `shares` is the part to pay of what is shared with other operators.
    """
    total = way.work + way.sent
    for number, wanted, cost in operand_moves(way, eqn, shardings, shares):
        if total >= limit:
            return total
        total += cost * shares.of_move(number, wanted) if shares and cost else cost
    return total + results_cost(way, eqn, targets, shares)


def operand_moves(
    way: Way, eqn: JaxprEqn, shardings: Shardings, shares: Shares | None = None
) -> Iterator[tuple[int, Sharding, float]]:
    """The number of each operand, the sharding that the way needs it under, and the cost."""
    operands = zip(eqn.invars, shardings, way.operands, strict=True)
    for number, (atom, here, wanted) in enumerate(operands):
        part = shares.narrow[number] if shares else 1.0
        yield number, wanted, reshard_cost(here, wanted, atom.aval.shape, atom.aval.dtype, part)


def results_cost(way: Way, eqn: JaxprEqn, targets: Targets, shares: Shares | None = None) -> float:
    """The cost of reducing results and of resharding them as wanted."""
    total = 0.0
    for var, here, target in zip(eqn.outvars, way.results, targets, strict=True):
        cost = combine_cost(here, way.kind, target, var.aval)
        total += cost * shares.of_sum if shares and here.unreduced else cost
    return total


# ---------------------------------------------------------------- splits of factors


@dataclass(frozen=True)
class FactorSplit:
    """An operator under one split of its factors, with the local shape of each of its tensors."""

    factors: Factors
    chosen: Assignment
    operands: tuple[tuple[Sharding, tuple[int, ...]], ...]  # sharding and local shape
    results: tuple[tuple[Sharding, tuple[int, ...]], ...]  # unreduced if reduced factors are split
    in_place: bool = False  # no communication: operands and results already have these shardings

    @staticmethod
    def of(eqn: JaxprEqn, factors: Factors, chosen: Assignment, num_devices: int) -> FactorSplit:
        """The layout of `eqn` with its factors split as `chosen`."""
        operands, results = (
            tuple(
                (
                    shard(dims, chosen, factors, num_devices),
                    local_dims(dims, chosen, factors, atom.aval.shape),
                )
                for dims, atom in zip(tensors, atoms, strict=True)
            )
            for shard, tensors, atoms in (
                (shard_dims, factors.operands, eqn.invars),
                (shard_result, factors.results, eqn.outvars),
            )
        )
        return FactorSplit(factors, chosen, operands, results)

    def between(self, eqn: JaxprEqn, shardings: Shardings, targets: Targets) -> FactorSplit:
        """This layout between these shardings of operands and wanted shardings of results."""
        atoms, given = (*eqn.invars, *eqn.outvars), (*shardings, *targets)
        usual = tuple((s, s.local_shape(a.aval.shape)) for s, a in zip(given, atoms, strict=True))
        return replace(self, in_place=usual == self.operands + self.results)

    def work(self, eqn: JaxprEqn, operations: Work | None) -> float:
        """The local work, in bytes that could be sent in the same time."""
        flops, touched = 0.0, 0
        if operations:
            sizes, chosen = self.factors.sizes, self.chosen
            flops = operations(
                {f: s.rows(n) if (s := chosen.get(f)) else n for f, n in sizes.items()}
            )
        atoms = (*eqn.invars, *eqn.outvars)
        for atom, (_, local) in zip(atoms, self.operands + self.results, strict=True):
            touched += math.prod(local) * itemsize_of(atom.aval.dtype)
        return worked(flops, touched)

    def way(self, eqn: JaxprEqn, work: Work | None = None) -> Way:
        """To run `eqn` like this."""
        return Way(
            tuple([sharding for sharding, _ in self.operands]),
            tuple([sharding for sharding, _ in self.results]),
            self,
            self.factors.reduction(self.chosen),
            self.work(eqn, work),
        )

    def blanks(self, eqn: JaxprEqn) -> Tiles:
        """The results of `eqn` in place, without elements."""
        return self._of(eqn, self._types(eqn))

    def copied(self, eqn: JaxprEqn, local: LocalOp, tiles: Sequence[Tile]) -> Tiles | None:
        """The results of `eqn` on these tiles, as it is; None where it does not run in place."""
        if not (local is bind_local or isinstance(local, BindLocal)) or not self._takes(tiles):
            return None
        shapes = [shape for _, shape in self.results]
        params = local.params(eqn, shapes) if isinstance(local, BindLocal) else None
        arrays = copied(eqn, [t.array for t in tiles], self._types(eqn), params)
        return arrays and self._of(eqn, arrays)

    def _takes(self, tiles: Sequence[Tile]) -> bool:
        here = [sharding for sharding, _ in self.operands]  # results are evened out
        return self.in_place and [t.sharding for t in tiles] == here

    def _types(self, eqn: JaxprEqn) -> list[Any]:
        pairs = [(v.aval, shape) for v, (_, shape) in zip(eqn.outvars, self.results, strict=True)]
        return [local_type(n, a.dtype, a.weak_type, memory_space=a.memory_space) for a, n in pairs]

    def _of(self, eqn: JaxprEqn, arrays: Sequence[Any]) -> Tiles:
        made = zip(eqn.outvars, arrays, self.results, strict=True)
        return [Tile(array, here, v.aval.shape) for v, array, (here, _) in made]

    def run(
        self, ctx: Context, eqn: JaxprEqn, local: LocalOp, tiles: Tiles, targets: Targets
    ) -> Tiles:
        """The results of `eqn` under this split, as `local` computes them."""
        if self._takes(tiles):
            return self._of(eqn, local(ctx, eqn, tiles, [shape for _, shape in self.results]))
        name, factors = eqn.primitive.name, self.factors
        ready, operands = [], zip(tiles, factors.operands, self.operands, strict=True)
        for tile, dims, (sharding, shape) in operands:
            tile = ctx.reshard(tile, sharding, Reason("operand", name))
            if tile.array.shape != shape:
                tile = ctx.retile(tile, shape, Reason("operand", name))
            ready.append(mask_for(ctx.place, tile, dims, factors) if factors.reduced else tile)
        arrays = local(ctx, eqn, ready, [shape for _, shape in self.results])
        kind = factors.reduction(self.chosen)
        results, made = [], zip(eqn.outvars, self.results, arrays, targets, strict=True)
        for var, (here, _), array, target in made:
            tile = Tile(array, here, tuple(var.aval.shape), name)
            stays = ctx.stays_unreduced(var, tile, kind)
            results.append(tile if stays else combine(ctx.place, tile, kind, target))
        return results


def by_factors(
    eqn: JaxprEqn,
    factors: Factors,
    shardings: Shardings,
    targets: Targets,
    kept: Collection[Factor] = (),
    work: Work | None = None,
) -> Iterator[Way]:
    """Every split of the factors that operands and results suggest; all of them are correct.

    `kept` factors stay split if any tensor splits them, even if a gather were cheaper. `work`
    counts the floating-point operations on factors of given local sizes, for operators that
    compute for longer than they read and write memory.
    """
    count = (*targets, *shardings)[0].num_devices
    for chosen in assignments(factors, shardings, targets, kept):
        yield FactorSplit.of(eqn, factors, chosen, count).way(eqn, work)


def replicated_way(
    eqn: JaxprEqn, shardings: Shardings, targets: Targets, limit: int
) -> Iterator[Way]:
    """On replicated operands, on every device."""
    count = (*targets, *shardings)[0].num_devices if (*targets, *shardings) else 1
    operands, results = (
        tuple([Sharding.replicated(len(a.aval.shape), count) for a in atoms])
        for atoms in (eqn.invars, eqn.outvars)
    )
    yield Way(operands, results)
