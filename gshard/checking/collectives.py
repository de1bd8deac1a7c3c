"""What collectives do, on the values of all devices; and what each device sends and receives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as p

from gshard._jax import private_primitives
from gshard.checking.exact.number import Move, Value, at, chosen, joined, moved, plain, spread
from gshard.checking.exact.operators import folded, narrowed, summed, summed_in
from gshard.checking.exact.pointwise import larger, smaller
from gshard.checking.tiles import Tiling
from gshard.tensors.manual import (
    NamedAxes,
    collective_p,
    lower_named_axes,
    over_groups_p,
    partition_id_p,
    row_of_device_p,
    to_manual_p,
)

Settings = Mapping[str, Any]  # of a collective
Arrays = dict[int, np.ndarray]
(_reduce_scatter_p,) = private_primitives("lax.parallel", "reduce_scatter_p")
_EXTREMES = {p.pmax_p: larger, p.pmin_p: smaller}
_IN_PIECES = (_reduce_scatter_p, p.all_to_all_p)
RUN_TOGETHER = {
    *_EXTREMES, *_IN_PIECES, p.psum_p, p.all_gather_p, p.ppermute_p, p.ragged_all_to_all_p,
    *private_primitives("lax.parallel", "psum_invariant_p", "all_gather_invariant_p"),
}  # fmt: skip


def over_groups(eqn: JaxprEqn, axes: NamedAxes) -> JaxprEqn:
    """A collective over named axes, or one of `gshard.manual`, as one over groups of devices, or
    over their pairs; any other equation as it is."""
    if eqn.primitive is collective_p:
        kind, dim, groups = (eqn.params[k] for k in ("kind", "dim", "groups"))
        primitive, settings = {
            "all_reduce": (p.psum_p, {}),
            "all_gather": (p.all_gather_p, {"all_gather_dimension": dim, "tiled": True}),
            "reduce_scatter": (_reduce_scatter_p, {"scatter_dimension": dim, "tiled": True}),
            "all_to_all": (p.all_to_all_p, {"split_axis": 0, "concat_axis": 0, "tiled": True}),
            "collective_permute": (p.ppermute_p, {}),
        }[kind]
        params = {"primitive": primitive, "settings": settings, "groups": groups}
        return eqn.replace(primitive=over_groups_p, params=params)
    lowered = lower_named_axes(eqn, axes)
    return eqn.replace(primitive=lowered[0], params=lowered[1]) if lowered else eqn


def _collective(eqn: JaxprEqn, operands: Sequence[Value], count: int) -> list[Value]:
    """The results of a collective over groups on all devices."""
    groups, primitive = eqn.params["groups"], eqn.params["primitive"]
    operands = [spread(x, count) for x in operands]
    if primitive is p.ppermute_p:
        return [_permuted(x, np.asarray(groups, int).reshape(-1, 2)) for x in operands]
    if primitive is p.ragged_all_to_all_p:
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
    q, primitive = dict(eqn.params["settings"]), eqn.params["primitive"]
    in_order = np.array_equal(groups.ravel(), np.arange(len(plain(x))))
    by_group: Move = lambda a: a.reshape(*groups.shape, *a.shape[1:])  # noqa: E731
    members = moved(by_group, x) if in_order else at(x, groups)  # groups, members, ...
    if primitive not in _IN_PIECES:  # all members of a group have the same
        if primitive is p.psum_p:
            made = narrowed(eqn, summed(members, (1,)))
        elif primitive is p.all_gather_p:
            made = moved(_unstacked(1 + q["all_gather_dimension"], q["tiled"]), members)
        else:
            made = folded(_EXTREMES[primitive], members, 1)
        return made if len(groups) == 1 else at(made, _numbers(groups, len(plain(x))))
    pieces = moved(_cut(q, groups.shape[1]), members)  # groups, senders, receivers, ...
    if primitive is _reduce_scatter_p:
        made = narrowed(eqn, summed(pieces, (1,)))
    else:
        sent = moved(lambda a: np.swapaxes(a, 1, 2), pieces)
        made = moved(_unstacked(2 + q["concat_axis"], q["tiled"], 2), sent)
    made = moved(lambda a: a.reshape(-1, *a.shape[2:]), made)
    return made if in_order else at(made, np.argsort(groups.ravel()))


def _numbers(groups: Sequence[Sequence[int]] | np.ndarray, count: int) -> np.ndarray:
    """For each device the number of its group."""
    found = np.zeros(count, int)
    for number, group in enumerate(groups):
        found[list(group)] = number
    return found


def _unstacked(dim: int, tiled: bool, first: int = 1) -> Callable[[np.ndarray], np.ndarray]:
    """The members' dim, which is `first`, moved to or into `dim`."""

    def unstack(a: np.ndarray) -> np.ndarray:
        a = np.moveaxis(a, first, dim)
        if not tiled:
            return a
        return a.reshape(*a.shape[:dim], a.shape[dim] * a.shape[dim + 1], *a.shape[dim + 2 :])

    return unstack


def _cut(q: Settings, parts: int) -> Callable[[np.ndarray], np.ndarray]:
    """What each member sends to each: a dim cut into parts, whose number becomes dim 2."""
    dim = 2 + q.get("scatter_dimension", q.get("split_axis", 0))

    def cut(a: np.ndarray) -> np.ndarray:
        shape = (*a.shape[:dim], parts, a.shape[dim] // parts, *a.shape[dim + 1 :])
        pieces = np.moveaxis(a.reshape(shape), dim, 2)
        return pieces if q["tiled"] else pieces.squeeze(dim + 1)

    return cut


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
    eqn: JaxprEqn, operand: np.ndarray, device: int, axes: NamedAxes
) -> tuple[Arrays, Arrays]:
    """What a device sends to which others, and what it receives from which.

    That is the meaning of a collective; how messages are routed is up to the hardware.
    """
    of, own = over_groups(eqn, axes).params, spread(operand, axes.grid.size)
    groups, settings = of["groups"], dict(of["settings"])
    if of["primitive"] is p.ppermute_p:
        sent = {b: own[a] for a, b in groups if a == device != b}
        return sent, {a: own[a] for a, b in groups if b == device != a}
    group = next(g for g in groups if device in g)
    others = [d for d in group if d != device]
    if of["primitive"] not in _IN_PIECES:
        return dict.fromkeys(others, own[device]), {d: own[d] for d in others}
    pieces = _cut(settings, len(group))(own[[group]])[0]
    number = {d: n for n, d in enumerate(group)}
    sent = {d: pieces[number[device], number[d]] for d in others}
    return sent, {d: pieces[number[d], number[device]] for d in others}


# ------------------------------------------------------------------------ manual regions


def run_manual(eqn: JaxprEqn, operands: Sequence[Value], count: int) -> list[Value]:
    """The results of a collective over groups, or of the border of a manual region."""
    if eqn.primitive in (partition_id_p, row_of_device_p):
        return [np.asarray(eqn.params.get("table", np.arange(count)), np.int32)]
    if eqn.primitive is over_groups_p:
        return _collective(eqn, operands, count)
    sharding, copies = eqn.params["annotation"].sharding, eqn.params["copies"]
    if eqn.primitive is to_manual_p:
        tiling = Tiling(sharding, tuple(eqn.invars[0].aval.shape))
        tiles, first = spread(tiling.cut(operands[0]), count), sharding.first_copies
        if copies == "first":
            tiles = moved(lambda a: np.where(first.reshape(-1, *(1,) * (a.ndim - 1)), a, 0), tiles)
        return [tiles]
    tiles = spread(operands[0], count)
    if copies == "all" and sharding.replicas > 1:
        groups = sharding.copies
        tiles = at(summed_in(groups, tiles), _numbers(groups, count))
    return [Tiling(sharding, tuple(eqn.params["shape"])).assembled(tiles)]
