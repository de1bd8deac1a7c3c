"""Operators that rearrange dims without computing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as p

from gshard.graph.reason import Reason
from gshard.moving.costs import timed
from gshard.moving.fetch import Along, fetch
from gshard.moving.row_windows import plan_fetch
from gshard.rules.base.rule import BindLocal, Context, Doc, Way, linear_in, linear_in_all, rule
from gshard.rules.base.ways import FactorSplit, by_factors
from gshard.tensors.factors import Factors, Shape, made_dims
from gshard.tensors.sharding import Sharding, Shardings, Targets
from gshard.tensors.tile import Tile, Tiles, byte_size


@rule(
    p.transpose_p,
    level=0,
    linear=linear_in_all,
    doc=Doc(free="every dim"),
)
def transpose_factors(eqn: JaxprEqn) -> Factors:
    """Dims change places."""
    names = [f"d{i}" for i in range(len(eqn.invars[0].aval.shape))]
    return Factors.of(eqn, [names], [[names[i] for i in eqn.params["permutation"]]])


@rule(
    p.broadcast_in_dim_p,
    local=BindLocal(lambda eqn, shapes: {"shape": shapes[0]}),
    level=0,
    linear=linear_in((0,)),
    doc=Doc(free="every dim"),
)
def broadcast_factors(eqn: JaxprEqn) -> Factors:
    """New dims are free; a dim of size 1 that grows is unsplit."""
    shape = eqn.outvars[0].aval.shape
    names = [f"d{i}" for i in range(len(shape))]
    operand = [
        names[to] if n == shape[to] else None
        for n, to in zip(eqn.invars[0].aval.shape, eqn.params["broadcast_dimensions"], strict=True)
    ]
    return Factors.of(eqn, [operand], [names])


@rule(p.squeeze_p, level=0, linear=linear_in_all, doc=Doc(free="every dim"))
def squeeze_factors(eqn: JaxprEqn) -> Factors:
    """Dims of size 1 go."""
    gone = eqn.params["dimensions"]
    names = [None if d in gone else f"d{d}" for d in range(len(eqn.invars[0].aval.shape))]
    return Factors.of(eqn, [names], [[n for n in names if n is not None]])


@dataclass(frozen=True)
class _Mixed:
    """Dims `first[s]` to `end[s]` of either side that mix; the factor is that of the first ones."""

    factor: str
    first: tuple[int, int]
    end: tuple[int, int]


def _reshape_factors(eqn: JaxprEqn) -> tuple[Factors, list[_Mixed]]:
    sizes: dict[str, int] = {}
    replicated: set[str] = set()
    mixed: list[_Mixed] = []

    def factor(size: int, splittable: bool = True) -> str:
        name = f"f{len(sizes)}"
        sizes[name] = size
        if not splittable:
            replicated.add(name)
        return name

    sides = [list(a.aval.shape) for a in (*eqn.invars, *eqn.outvars)]
    dims: list[list[list[str]]] = [[[] for _ in side] for side in sides]
    if 0 in sides[0]:
        for side, found in zip(sides, dims, strict=True):
            for number, size in enumerate(side):
                found[number].append(factor(size, splittable=False))
    else:
        _match(sides, dims, factor, mixed)
    operand, result = (tuple(tuple(d) for d in side) for side in dims)
    resized = frozenset(m.factor for m in mixed)
    unsplit, ordered = frozenset(replicated), frozenset[str]()
    return Factors(
        (operand,), (result,), sizes, replicated=unsplit, resized=resized, ordered=ordered
    ), mixed


def _match(
    sides: list[list[int]],
    dims: list[list[list[str]]],
    factor: Callable[..., str],
    mixed: list[_Mixed],
) -> None:
    """Walk both shapes from the major end, taking off what the current dims have in common."""
    at, left = [0, 0], [1, 1]  # the current dim on either side, and what is left of its size
    while True:
        for s in range(2):
            while left[s] == 1 and at[s] < len(sides[s]):
                left[s] = sides[s][at[s]]
                if left[s] == 1:  # corresponds to nothing on the other side
                    dims[s][at[s]].append(factor(1, splittable=False))
                    at[s] += 1
        if left == [1, 1]:
            return
        common = math.gcd(*left)
        if common > 1:
            name = factor(common)
            for s in range(2):
                dims[s][at[s]].append(name)
        else:  # these dims mix: take dims until the products agree, and leave them unsplit
            taken = [1, 1]
            first = (at[0], at[1])
            while taken[0] != taken[1] or taken[0] == 1:
                s = 0 if taken[0] <= taken[1] else 1
                size = left[s] if taken[s] == 1 else sides[s][at[s]]
                dims[s][at[s]].append(factor(size, splittable=False))
                taken[s] *= size
                at[s] += 1
            before = [dims[s][first[s]][:-1] for s in range(2)]
            if before[0] == before[1]:
                name = factor(sides[0][first[0]])
                for s in range(2):
                    dims[s][first[s]] = [name]
                mixed.append(_Mixed(name, first, (at[0], at[1])))
            left = [1, 1]
            continue
        for s in range(2):
            left[s] //= common
            at[s] += left[s] == 1


def reshape_ways(
    eqn: JaxprEqn, shardings: Shardings, targets: Targets, limit: int
) -> Iterator[Way]:
    """Every split of the factors; of mixed dims, the elements that change tiles are sent."""
    factors, mixing = _reshape_factors(eqn)
    for way in by_factors(eqn, factors, shardings, targets):
        ((_, before),), ((_, after),) = way.how.operands, way.how.results
        sent, now, aval = 0, list(before), eqn.invars[0].aval
        for m in reversed(mixing):
            if split := way.how.chosen[m.factor]:
                have, size = (math.prod(s[m.first[0] : m.end[0]]) for s in (now, aval.shape))
                width = math.prod(after[m.first[1] : m.end[1]])
                starts = np.arange(split.tiles) * width
                rows = plan_fetch(split.tiles, size, starts, width, rows=have).sent
                sent += rows * byte_size((*now[: m.first[0]], *now[m.end[0] :]), aval.dtype)
                now[m.first[0] : m.end[0]] = [width]
        mixed = [m for m in mixing if way.how.chosen[m.factor]]
        way = way._replace(how=_MixedReshape(way.how, mixed)) if mixed else way
        yield way._replace(sent=timed(sent, 1)) if sent else way


@dataclass(frozen=True)
class _MixedReshape:
    """A reshape of split dims that mix: their elements pass between tiles (Figure 4c)."""

    layout: FactorSplit
    mixed: Sequence[_Mixed]

    def run(self, ctx: Context, eqn: JaxprEqn, _: Any, tiles: Tiles, targets: Targets) -> Tiles:
        """The elements of each tile of the result are fetched, then reshaped."""
        shape = tuple(eqn.outvars[0].aval.shape)
        ((wanted, before),), ((result, local),) = self.layout.operands, self.layout.results
        tile = ctx.reshard(tiles[0], wanted, Reason("operand", "reshape"))
        tile = ctx.retile(tile, before, Reason("operand", "reshape"))
        for m in reversed(self.mixed):  # from the end, so that dim numbers stay
            flat = _flattened(tile, m.first[0], m.end[0])
            width = math.prod(local[m.first[1] : m.end[1]])
            starts = np.arange(flat.sharding.tiles[m.first[0]]) * width
            reason = Reason("step", "reshape", "elements of mixed dims between tiles")
            x = fetch(ctx.place, flat, reason, Along(m.first[0], starts, width))
            tile = Tile(x, flat.sharding, flat.shape)
        return [Tile(lax.reshape(tile.array, local), result, shape)]


@rule(
    p.reshape_p,
    ways=reshape_ways,
    level=0,
    linear=linear_in_all,
    local=BindLocal(lambda eqn, shapes: {"new_sizes": shapes[0]}),
    doc=Doc(
        free="where the tiles divide the dims' common factors",
        halo="uneven splits, the first of dims that mix: the elements that change tiles",
        gather="later ones of dims that mix: AllGather",
    ),
)
def reshape_factors(eqn: JaxprEqn) -> Factors:
    """Dims as products of the factors that both shapes have in common.

    [12, 5] -> [3, 20] has the factors 3, 4, 5: the operand's dims are (3 4)(5), the result's
    (3)(4 5). Dims that share no factors ([6, 4] -> [8, 3]) mix: the first of them may be split, as
    its tiles are runs of the mixed dims' elements on either side; the others must be unsplit.
    """
    return _reshape_factors(eqn)[0]


def _flattened(tile: Tile, first: int, end: int) -> Tile:
    """Some dims as one, of which the first may be split."""

    def flat(sizes: Sequence[int]) -> Shape:
        return (*sizes[:first], math.prod(sizes[first:end]), *sizes[end:])

    splits = (*tile.sharding.splits[: first + 1], *tile.sharding.splits[end:])
    array = lax.reshape(tile.array, flat(tile.array.shape))
    return Tile(array, Sharding(splits, tile.sharding.num_devices), flat(tile.shape))


@rule(
    p.iota_p,
    factors=made_dims,
    ways=lambda eqn, shardings, targets, limit: [Way(tuple(shardings), tuple(targets))],
    level=0,
    doc=Doc(free="every dim"),
)
def _iota(ctx: Context, eqn: JaxprEqn, way: Way, tiles: Tiles, targets: Targets) -> Tiles:
    dtype, dim = eqn.params["dtype"], eqn.params["dimension"]
    shape = tuple(eqn.outvars[0].aval.shape)
    local = lax.broadcasted_iota(dtype, targets[0].local_shape(shape), dim)
    tile = Tile(local, targets[0], shape)
    offset = tile.offset(ctx.place, dim)
    if isinstance(offset, int) and offset == 0:
        return [tile]
    return [Tile(local + jnp.asarray(offset, dtype), targets[0], shape)]


@rule(
    p.bitcast_convert_type_p,
    level=0,
    doc=Doc(free="every dim that keeps its size", gather="one that does not: AllGather"),
)
def bitcast_factors(eqn: JaxprEqn) -> Factors:
    """Leading dims are free; one that only the operand has, or the result, is unsplit."""
    ranks = [len(a.aval.shape) for a in (eqn.invars[0], eqn.outvars[0])]
    operand, result = ([f"d{i}" if i < min(ranks) else None for i in range(n)] for n in ranks)
    return Factors.of(eqn, [operand], [result])
