"""What collectives do, on the values of all devices; and what each device sends and receives."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as p

from gshard._jax import private_primitives
from gshard.checking.exact.number import Move, Value, at, chosen, joined, moved, plain, spread
from gshard.checking.exact.operators import folded, narrowed, summed, summed_in
from gshard.checking.exact.pointwise import larger, smaller
from gshard.checking.tiles import Tiling
from gshard.moving.partial import copies_groups
from gshard.tensors.manual import (
    collective_p,
    over_groups_p,
    partition_id_p,
    row_of_device_p,
    to_manual_p,
)

Sizes = Mapping[str, int]  # of the axes of the mesh
Arrays = dict[int, np.ndarray]
_AXIS = "devices"
_parallel = functools.partial(private_primitives, "lax.parallel")
(_reduce_scatter_p,) = _parallel("reduce_scatter_p")
_SUMS = (p.psum_p, *_parallel("psum_invariant_p"))
_GATHERS = (p.all_gather_p, *_parallel("all_gather_invariant_p"))
_EXTREMES = {p.pmax_p: larger, p.pmin_p: smaller}
_IN_PIECES = (_reduce_scatter_p, p.all_to_all_p)
RUN_TOGETHER = {
    *_SUMS, *_GATHERS, *_EXTREMES, *_IN_PIECES, p.ppermute_p, p.ragged_all_to_all_p,
}  # fmt: skip


def groups_of(eqn: JaxprEqn, sizes: Sizes) -> list[tuple[int, ...]]:
    """The groups of devices that take part in a collective together, in their order."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name"))
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    grid = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    numbers = [list(sizes).index(name) for name in axes]
    others = [d for d in range(grid.ndim) if d not in numbers]
    members = math.prod(grid.shape[d] for d in numbers)
    rows = grid.transpose(*others, *numbers).reshape(-1, members)
    listed = eqn.params.get("axis_index_groups")
    if not listed:
        return [tuple(row.tolist()) for row in rows]
    return [tuple(int(row[i]) for i in group) for row in rows for group in listed]


def run_collective(eqn: JaxprEqn, operands: Sequence[Value], sizes: Sizes) -> list[Value]:
    """The results of a collective on all devices; the number of each, for `axis_index`."""
    groups, count = groups_of(eqn, sizes), math.prod(sizes.values())
    if eqn.primitive is p.axis_index_p:
        rank = np.zeros(count, np.int32)
        for group in groups:
            rank[list(group)] = np.arange(len(group))
        return [rank]
    operands = [spread(x, count) for x in operands]
    if eqn.primitive is p.ppermute_p:
        return [_permuted(operands[0], _pairs(eqn, groups))]
    if eqn.primitive is p.ragged_all_to_all_p:
        return [_ragged(operands, groups)]
    results: list[Value] = list(operands)
    for size in sorted(set(map(len, groups))):  # groups of a reduction may have different sizes
        alike = np.asarray([g for g in groups if len(g) == size])
        made = [_in_groups(eqn, x, alike) for x in operands]
        if alike.size == count:
            return made
        members = np.isin(np.arange(count), alike)
        results = [chosen(members, m, r) for m, r in zip(made, results, strict=True)]
    return results


def _in_groups(eqn: JaxprEqn, x: Value, groups: np.ndarray) -> Value:
    """A collective in groups of one size."""
    q, primitive = eqn.params, eqn.primitive
    in_order = np.array_equal(groups.ravel(), np.arange(len(plain(x))))
    by_group: Move = lambda a: a.reshape(*groups.shape, *a.shape[1:])  # noqa: E731
    members = moved(by_group, x) if in_order else at(x, groups)  # groups, members, ...
    if primitive not in _IN_PIECES:  # all members of a group have the same
        if primitive in _SUMS:
            made = narrowed(eqn, summed(members, (1,)))
        elif primitive in _GATHERS:
            made = moved(_unstacked(1 + q["all_gather_dimension"], q["tiled"]), members)
        else:
            made = folded(_EXTREMES[primitive], members, 1)
        if len(groups) == 1:
            return made
        number = np.zeros(len(plain(x)), int)
        number[groups] = np.arange(len(groups))[:, None]
        return at(made, number)
    pieces = moved(_cut(eqn, groups.shape[1]), members)  # groups, senders, receivers, ...
    if primitive is _reduce_scatter_p:
        made = narrowed(eqn, summed(pieces, (1,)))
    else:
        sent = moved(lambda a: np.swapaxes(a, 1, 2), pieces)
        made = moved(_unstacked(2 + q["concat_axis"], q["tiled"], 2), sent)
    made = moved(lambda a: a.reshape(-1, *a.shape[2:]), made)
    return made if in_order else at(made, np.argsort(groups.ravel()))


def _unstacked(dim: int, tiled: bool, first: int = 1) -> Callable[[np.ndarray], np.ndarray]:
    """The members' dim, which is `first`, moved to or into `dim`."""

    def unstack(a: np.ndarray) -> np.ndarray:
        a = np.moveaxis(a, first, dim)
        if not tiled:
            return a
        return a.reshape(*a.shape[:dim], a.shape[dim] * a.shape[dim + 1], *a.shape[dim + 2 :])

    return unstack


def _cut(eqn: JaxprEqn, parts: int) -> Callable[[np.ndarray], np.ndarray]:
    """What each member sends to each: a dim cut into parts, whose number becomes dim 2."""
    dim = 2 + eqn.params.get("scatter_dimension", eqn.params.get("split_axis"))

    def cut(a: np.ndarray) -> np.ndarray:
        shape = (*a.shape[:dim], parts, a.shape[dim] // parts, *a.shape[dim + 1 :])
        pieces = np.moveaxis(a.reshape(shape), dim, 2)
        return pieces if eqn.params["tiled"] else pieces.squeeze(dim + 1)

    return cut


def _pairs(eqn: JaxprEqn, groups: Sequence[Sequence[int]]) -> np.ndarray:
    """The (source, destination) pairs of a permutation, as numbers of devices."""
    pairs = [(group[a], group[b]) for group in groups for a, b in eqn.params["perm"]]
    return np.asarray(pairs, int).reshape(-1, 2)


def _permuted(x: Value, pairs: np.ndarray) -> Value:
    def permuted(a: np.ndarray) -> np.ndarray:
        out = np.zeros(a.shape, a.dtype)
        out[pairs[:, 1]] = a[pairs[:, 0]]
        return out

    return moved(permuted, x)


def _ragged(operands: Sequence[Value], groups: Sequence[Sequence[int]]) -> Value:
    """Rows that devices send to each other; the sizes are data."""
    rows, output, starts, counts, ends, _ = operands

    def sent(both: Sequence[np.ndarray]) -> np.ndarray:
        out = np.array(both[1])
        for group in groups:
            per_member = starts.shape[1] // len(group)
            for source in group:
                for n in np.flatnonzero(counts[source]):
                    a, size, b = (int(x[source, n]) for x in (starts, counts, ends))
                    out[group[n // per_member], b : b + size] = both[0][source, a : a + size]
        return out

    return joined(sent, [rows, output])


def exchanged(
    eqn: JaxprEqn, operand: np.ndarray, device: int, sizes: Sizes
) -> tuple[Arrays, Arrays]:
    """What a device sends to which others, and what it receives from which.

    That is the meaning of a collective; how messages are routed is up to the hardware.
    """
    groups, own = groups_of(eqn, sizes), spread(operand, math.prod(sizes.values()))
    if eqn.primitive is p.ppermute_p:
        pairs = [(int(a), int(b)) for a, b in _pairs(eqn, groups) if a != b]
        sent = {b: own[a] for a, b in pairs if a == device}
        return sent, {a: own[a] for a, b in pairs if b == device}
    group = next(g for g in groups if device in g)
    others = [d for d in group if d != device]
    if eqn.primitive not in _IN_PIECES:
        return dict.fromkeys(others, own[device]), {d: own[d] for d in others}
    pieces, number = _cut(eqn, len(group))(own[[group]])[0], {d: n for n, d in enumerate(group)}
    sent = {d: pieces[number[device], number[d]] for d in others}
    return sent, {d: pieces[number[d], number[device]] for d in others}


# ------------------------------------------------------------------------ manual regions


def run_manual(eqn: JaxprEqn, operands: Sequence[Value], count: int) -> list[Value]:
    """The results of an operator of a manual region of the user's program, on all devices."""
    if eqn.primitive in (partition_id_p, row_of_device_p):
        return [np.asarray(eqn.params.get("table", np.arange(count)), np.int32)]
    if eqn.primitive in (collective_p, over_groups_p):
        return run_collective(_over_one_axis(eqn), operands, {_AXIS: count})
    sharding, copies = eqn.params["annotation"].sharding, eqn.params["copies"]
    if eqn.primitive is to_manual_p:
        tiling = Tiling(sharding, tuple(eqn.invars[0].aval.shape))
        tiles = spread(tiling.cut(operands[0]), count)
        if copies == "first":
            first = np.isin(np.arange(count), sharding.devices[..., 0].ravel())
            tiles = moved(lambda a: np.where(first.reshape(-1, *(1,) * (a.ndim - 1)), a, 0), tiles)
        return [tiles]
    tiles = spread(operands[0], count)
    if copies == "all" and sharding.replicas > 1:
        groups = copies_groups(sharding)
        number = np.zeros(count, int)
        for n, group in enumerate(groups):
            number[list(group)] = n
        tiles = at(summed_in(groups, tiles), number)
    return [Tiling(sharding, tuple(eqn.params["shape"])).assembled(tiles)]


def _over_one_axis(eqn: JaxprEqn) -> JaxprEqn:
    """A collective of a region as JAX's own, over one axis of all devices and its groups."""
    groups = eqn.params["groups"]
    if eqn.primitive is over_groups_p:
        primitive, params = eqn.params["primitive"], dict(eqn.params["settings"])
    else:
        dim = eqn.params["dim"]
        primitive, params = {
            "all_reduce": (p.psum_p, {}),
            "all_gather": (p.all_gather_p, {"all_gather_dimension": dim, "tiled": True}),
            "reduce_scatter": (_reduce_scatter_p, {"scatter_dimension": dim, "tiled": True}),
            "all_to_all": (p.all_to_all_p, {"split_axis": 0, "concat_axis": 0, "tiled": True}),
            "collective_permute": (p.ppermute_p, {}),
        }[eqn.params["kind"]]
    if primitive is p.ppermute_p:
        params |= {"axis_name": (_AXIS,), "perm": groups}
    else:
        name = "axes" if primitive in (*_SUMS, *_EXTREMES) else "axis_name"
        params |= {name: (_AXIS,), "axis_index_groups": groups}
    return eqn.replace(primitive=primitive, params=params)
