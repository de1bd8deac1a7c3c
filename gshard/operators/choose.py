"""The cheapest way to run an operator that is described by factors.

Every split of the factors is correct. Its cost is the bytes that a device sends to reshard the
operands, to combine partial results and to reshard the result as wanted, and the time of the local
work; the cheapest is taken (section 3.3.2, "Einsum Case Study").
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from gshard import _jax
from gshard.graph.reason import Reason
from gshard.moving.costs import machine
from gshard.moving.partial import combine, combine_cost, mask_for
from gshard.moving.plan import reshard_cost
from gshard.operators.rule import (
    MOST_REMEMBERED,
    RULES,
    Context,
    Rule,
    Shares,
    bind_local,
)
from gshard.tensors.factors import Dim, Factor, Factors, compose, decompose
from gshard.tensors.sharding import Sharding, Split, compatible
from gshard.tensors.tile import Tile, itemsize_of

Assignment = Mapping[Factor, Split | None]


@dataclass(frozen=True)
class Layout:
    """An operator under one split of its factors, with the sharding of each of its tensors."""

    factors: Factors
    chosen: Assignment
    operands: tuple[tuple[Sharding, tuple[int, ...]], ...]  # sharding and local shape
    results: tuple[tuple[Sharding, tuple[int, ...]], ...]  # unreduced if reduced factors are split
    in_place: bool = False  # no communication: operands and results already have these shardings
    types: dict[Any, Any] = field(default_factory=dict)  # of local results, by those of operands

    @staticmethod
    def of(eqn: JaxprEqn, factors: Factors, chosen: Assignment, num_devices: int) -> Layout:
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
        return Layout(factors, chosen, operands, results)

    def between(
        self, eqn: JaxprEqn, shardings: Sequence[Sharding], targets: Sequence[Sharding]
    ) -> Layout:
        """This layout between these shardings of operands and wanted shardings of results."""
        atoms, given = (*eqn.invars, *eqn.outvars), (*shardings, *targets)
        usual = tuple((s, s.local_shape(a.aval.shape)) for s, a in zip(given, atoms, strict=True))
        return replace(self, in_place=usual == self.operands + self.results)


def partition_by_factors(
    ctx: Context, eqn: JaxprEqn, rule: Rule, tiles: list[Tile], targets: list[Sharding]
) -> list[Tile]:
    """Run `eqn` under the cheapest split of its factors; results may still need resharding."""
    return run_as(ctx, eqn, rule, cheapest(ctx, eqn, rule, tiles, targets), tiles, targets)


_cheapest_before: dict[Any, Layout] = {}


def cheapest(
    ctx: Context,
    eqn: JaxprEqn,
    rule: Rule,
    tiles: list[Tile],
    targets: list[Sharding],
    by_factors: bool = False,
) -> Layout:
    """The layout that `choose` finds, computed once for equal equations.

    `by_factors` is true for a rule with its own `partition` that does the same as `run_as` where
    nothing moves.
    """
    alike, shares = ctx.kind(eqn), ctx.shares(eqn, tiles)
    shardings = tuple([t.sharding for t in tiles])
    key = (alike, rule.factors, shardings, tuple(targets), shares, machine())
    found = None if alike is None else _cheapest_before.get(key)
    if found is None:
        factors = rule.factors(eqn)
        cost = functools.partial(default_cost, shares=shares) if shares else None
        chosen = choose(eqn, factors, shardings, targets, cost=cost)
        layout = Layout.of(eqn, factors, chosen, targets[0].num_devices)
        found = layout.between(eqn, shardings, targets)
        if alike is not None:
            if len(_cheapest_before) > MOST_REMEMBERED:
                _cheapest_before.clear()
                _in_place.clear()
            _cheapest_before[key] = found
            # That nothing moves is independent of costs, and so of the rest of the key.
            if found.in_place and (by_factors or not rule.partition):
                _in_place[alike, *shardings, *targets] = (rule, found)
    return found


_in_place: dict[Any, tuple[Rule, Layout]] = {}


def in_place_again(
    eqn: JaxprEqn, kind: int, tiles: Sequence[Tile], targets: Sequence[Sharding]
) -> list[Tile] | None:
    """The results of an equation equal to an earlier one that needed no communication; else None.

    It is copied onto local arrays directly, without a choice and without JAX's typing rules.
    """
    rule, layout = _in_place.get((kind, *[t.sharding for t in tiles], *targets), (None, None))
    # The user may have registered another rule meanwhile.
    if layout is None or rule is not RULES.get(eqn.primitive):
        return None
    values = [t.array for t in tiles]
    types = layout.types.get(_types(values))
    arrays = _jax.copied(eqn, values, types) if types else None
    if arrays is None:
        return None
    return [
        Tile(array, target, var.aval.shape)
        for var, array, target in zip(eqn.outvars, arrays, targets, strict=True)
    ]


def _types(values: Sequence[jax.Array]) -> tuple[Any, ...]:
    return tuple([jax.typeof(value) for value in values])


def run(
    ctx: Context,
    eqn: JaxprEqn,
    rule: Rule,
    factors: Factors,
    chosen: Assignment,
    tiles: list[Tile],
    targets: list[Sharding],
) -> list[Tile]:
    """Run `eqn` with its factors split as `chosen`."""
    layout = Layout.of(eqn, factors, chosen, targets[0].num_devices)
    return run_as(ctx, eqn, rule, layout, tiles, targets)


def run_as(
    ctx: Context,
    eqn: JaxprEqn,
    rule: Rule,
    layout: Layout,
    tiles: list[Tile],
    targets: list[Sharding],
) -> list[Tile]:
    """Run `eqn` as a layout says."""
    if layout.in_place and all(t.is_standard for t in tiles):  # as most operators are
        arrays = rule.local(ctx, eqn, tiles, [local for _, local in layout.results])
        if rule.local is bind_local:
            values = [t.array for t in tiles]
            layout.types[_types(values)] = _jax.types_if_plain(eqn, values, arrays)
        return [
            Tile(array, target, var.aval.shape)
            for var, array, target in zip(eqn.outvars, arrays, targets, strict=True)
        ]
    name, factors = eqn.primitive.name, layout.factors
    ready = []
    for tile, dims, (sharding, local) in zip(tiles, factors.operands, layout.operands, strict=True):
        tile = ctx.reshard(tile, sharding, Reason("operand", name))
        if tile.array.shape != local:
            for dim, size in enumerate(local):
                tile = ctx.retile(tile, dim, size, Reason("operand", name))
        ready.append(mask_for(ctx.place, tile, dims, factors) if factors.reduced else tile)
    arrays = rule.local(ctx, eqn, ready, [local for _, local in layout.results])
    kind = factors.reduction(layout.chosen)
    results = []
    for var, (here, _), array, target in zip(
        eqn.outvars, layout.results, arrays, targets, strict=True
    ):
        tile = Tile(array, here, tuple(var.aval.shape), name)
        stays = ctx.stays_unreduced(var, tile, kind)
        results.append(tile if stays else combine(ctx.place, tile, kind, target))
    return results


def shard_dims(
    dims: Sequence[Dim], chosen: Assignment, factors: Factors, num_devices: int
) -> Sharding:
    """The sharding of a tensor with these dims if the factors are split as `chosen`."""
    return Sharding(tuple(compose(d, chosen, factors.sizes) for d in dims), num_devices)


def shard_result(
    dims: Sequence[Dim], chosen: Assignment, factors: Factors, num_devices: int
) -> Sharding:
    """The sharding of a result, before it is reduced over factors that occur in operands only."""
    here = shard_dims(dims, chosen, factors, num_devices)
    splits = [s for f, s in chosen.items() if s and f in factors.reduced]
    return here.unreduced_over(splits) if splits else here


def local_dims(
    dims: Sequence[Dim], chosen: Assignment, factors: Factors, shape: Sequence[int]
) -> tuple[int, ...]:
    """The local shape of such a tensor: a dim is the product of its factors' parts."""
    local = []
    for dim, n in zip(dims, shape, strict=True):
        if len(dim) < 2:
            split = chosen.get(dim[0]) if dim else None
            local.append(-(-n // split.tiles) if split else n)
        else:
            kept = decompose(compose(dim, chosen, factors.sizes), dim, factors.sizes)
            local.append(
                math.prod(-(-factors.sizes[f] // (kept[f].tiles if f in kept else 1)) for f in dim)
            )
    return tuple(local)


def choose(
    eqn: JaxprEqn,
    factors: Factors,
    shardings: Sequence[Sharding],
    targets: Sequence[Sharding],
    kept: Collection[Factor] = (),
    cost: Callable[..., float] | None = None,
) -> Assignment:
    """The cheapest split of every factor, out of those that operands and results suggest.

    `kept` factors stay split if any tensor splits them, even if a gather were cheaper. `cost` is
    for operators that do not run by `run`.
    """
    cost = cost or default_cost
    options: dict[Factor, list[Split | None]] = {f: [] for f in factors.sizes}
    tensors = [
        *zip(factors.operands, shardings, strict=True),
        *zip(factors.results, targets, strict=True),
    ]
    for dims, sharding in tensors:
        for dim, split in zip(dims, sharding.splits, strict=True):
            for factor, part in decompose(split, dim, factors.sizes).items():
                taker = factors.taken_over(factor, part)
                if taker and part not in options[taker]:
                    options[taker].append(part)
    if all(len(o) <= 1 for o in options.values()):
        agreed = {f: (o[0] if o else None) for f, o in options.items()}
        if _composable(agreed, factors) and _fits(agreed, factors, tensors):
            return agreed
    best, best_cost = None, math.inf
    free = [[*o] if o and f in kept else [*o, None] for f, o in options.items()]
    for splits in itertools.product(*free):
        candidate = dict(zip(options, splits, strict=True))
        if not compatible(tuple(s for s in splits if s)) or not _composable(candidate, factors):
            continue
        total = cost(eqn, factors, candidate, shardings, targets, best_cost)
        if total < best_cost:
            best, best_cost = candidate, total
    if best is None:  # the kept splits are incompatible
        return choose(eqn, factors, shardings, targets)
    return best


def _fits(
    chosen: Assignment, factors: Factors, tensors: Sequence[tuple[Sequence[Dim], Sharding]]
) -> bool:
    """Whether nothing has to move: all dims are already split like their factors."""
    reduced = any(chosen[f] for f in factors.reduced)
    return not reduced and all(
        compose(dim, chosen, factors.sizes) is split
        for dims, sharding in tensors
        for dim, split in zip(dims, sharding.splits, strict=True)
    )


def _composable(chosen: Assignment, factors: Factors) -> bool:
    """Whether no dim has to drop the split of one of its factors, as uneven tiles require."""
    for dims in [*factors.operands, *factors.results]:
        for dim in dims:
            if len(dim) > 1:
                kept = decompose(compose(dim, chosen, factors.sizes), dim, factors.sizes)
                if any(kept.get(f) is not chosen[f] for f in dim):
                    return False
    return True


def default_cost(
    eqn: JaxprEqn,
    factors: Factors,
    chosen: Assignment,
    shardings: Sequence[Sharding],
    targets: Sequence[Sharding],
    limit: float,
    shares: Shares | None = None,
    given: Mapping[int, Sharding] = MappingProxyType({}),
) -> float:
    """The cost of resharding operands, of the local work, and of reducing and resharding results.

    `shares` is the part to pay of what is shared with other operators. `given` are shardings of
    operands that the operator takes otherwise than its factors are split.
    """
    total = local_work(eqn, factors, chosen)
    for number, wanted, cost in operand_moves(eqn, factors, chosen, shardings, shares, given):
        if total >= limit:
            return total
        total += cost * shares.of_move(number, wanted) if shares and cost else cost
    return total + results_cost(eqn, factors, chosen, targets, shares)


def operand_moves(
    eqn: JaxprEqn,
    factors: Factors,
    chosen: Assignment,
    shardings: Sequence[Sharding],
    shares: Shares | None = None,
    given: Mapping[int, Sharding] = MappingProxyType({}),
) -> Iterator[tuple[int, Sharding, float]]:
    """The number of each operand, the sharding that the operator needs it under, and the cost."""
    for number, (atom, dims, sharding) in enumerate(
        zip(eqn.invars, factors.operands, shardings, strict=True)
    ):
        wanted = given.get(number) or shard_dims(dims, chosen, factors, sharding.num_devices)
        part, aval = shares.narrow[number] if shares else 1.0, atom.aval
        yield number, wanted, reshard_cost(sharding, wanted, aval.shape, aval.dtype, part)


def results_cost(
    eqn: JaxprEqn,
    factors: Factors,
    chosen: Assignment,
    targets: Sequence[Sharding],
    shares: Shares | None = None,
) -> float:
    """The cost of reducing results and of resharding them as wanted."""
    total, kind = 0.0, factors.reduction(chosen)
    for var, dims, target in zip(eqn.outvars, factors.results, targets, strict=True):
        here = shard_result(dims, chosen, factors, target.num_devices)
        cost = combine_cost(here, kind, target, var.aval)
        total += cost * shares.of_sum if shares and here.unreduced else cost
    return total


def local_work(eqn: JaxprEqn, factors: Factors, chosen: Assignment) -> float:
    """The local work, in bytes that could be sent in the same time."""
    part = {f: -(-n // s.tiles) if (s := chosen.get(f)) else n for f, n in factors.sizes.items()}
    rule = RULES[eqn.primitive]
    if rule.work:
        return rule.work(part) / machine().flops_per_byte
    touched = 0
    for dims, atom in [
        *zip(factors.operands, eqn.invars, strict=True),
        *zip(factors.results, eqn.outvars, strict=True),
    ]:
        local = local_dims(dims, chosen, factors, atom.aval.shape)
        touched += math.prod(local) * itemsize_of(atom.aval.dtype)
    return touched / machine().memory_per_byte
