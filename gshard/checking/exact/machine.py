"""The domain of exact numbers: all devices of an equation in one operation of NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as p

from gshard._jax import private_primitives
from gshard.checking.exact.number import (
    Exact,
    Value,
    at,
    chosen,
    constant,
    is_float,
    joined,
    leading,
    moved,
    of_floats,
    plain,
    spread,
)
from gshard.checking.exact.order import ORDER
from gshard.checking.exact.other import other
from gshard.checking.exact.pointwise import POINTWISE, aligned, bits_of, larger, smaller
from gshard.checking.exact.structure import STRUCTURE
from gshard.checking.exact.sums import SUMS, folded, summed, summed_in
from gshard.checking.exact.tiles import Tiling
from gshard.checking.replaying.collectives import Sizes, groups_of, rank_in
from gshard.moving.partial import copies_groups
from gshard.tensors.manual import (
    collective_p,
    over_groups_p,
    partition_id_p,
    row_of_device_p,
    to_auto_p,
    to_manual_p,
)

_AXIS = "devices"
(_reduce_scatter_p,) = private_primitives("lax.parallel", "reduce_scatter_p")
_REDUCING = (p.psum_p, p.pmax_p, p.pmin_p)
_OPERATORS: dict[str, Callable[..., Any]] = {**POINTWISE, **STRUCTURE, **ORDER, **SUMS}


class ExactNumbers:
    """Values with a leading dim of `count` devices, or of one entry that is everyone's."""

    def __init__(self, count: int):
        self.count = count

    def literal(self, value: Any, active: np.ndarray) -> Value:
        """A constant, in the type that it has in the program."""
        return constant(value)

    def row(self, value: Value, number: int) -> Value:
        """A row of a tensor."""
        return moved(lambda x: x[:, number], value)

    def stacked(self, rows: list[Value], aval: Any) -> Value:
        """The tensor of some rows."""
        if not rows:
            empty = np.zeros((1, *aval.shape), np.float64 if is_float(aval.dtype) else aval.dtype)
            return of_floats(empty) if is_float(aval.dtype) else empty
        count = max(map(leading, rows))
        return joined(lambda xs: np.stack(xs, 1), [spread(x, count) for x in rows])

    def on(self, value: Value, devices: np.ndarray) -> Value:
        """The value: other devices compute with it too, and nobody looks at that."""
        return value

    def merged(self, new: Value, old: Value | None, devices: np.ndarray) -> Value:
        """The new value on some devices, the old one on the others."""
        if old is None or devices.all():
            return new
        return chosen(devices.reshape(-1, *(1,) * (plain(new).ndim - 1)), new, old)

    def numbers(self, value: Value, count: int) -> np.ndarray:
        """An integer of each device."""
        return np.broadcast_to(plain(value), (count,))

    def local(self, eqn: JaxprEqn, operands: Sequence[Value], active: np.ndarray) -> list[Value]:
        """The results of an equation that sends nothing."""
        if manual := _MANUAL.get(eqn.primitive):
            return manual(self, eqn, operands)
        operator = _OPERATORS.get(eqn.primitive.name)
        if operator is None:
            return other(eqn, operands)
        if eqn.primitive.name in POINTWISE:
            operands = aligned(operands) if len(eqn.outvars) == 1 else operands
        made = operator(eqn, *operands)
        return made if isinstance(made, list) else [made]

    # ------------------------------------------------------------ collectives

    def collective(self, eqn: JaxprEqn, operands: Sequence[Value], sizes: Sizes) -> list[Value]:
        """The results of a collective on all devices; the number of each, for `axis_index`."""
        if eqn.primitive is p.axis_index_p:
            return [rank_in(eqn, sizes)]
        groups = groups_of(eqn, sizes)
        name = eqn.primitive.name
        if name == "ppermute":
            pairs = [(group[a], group[b]) for group in groups for a, b in eqn.params["perm"]]
            return [self._permuted(operands[0], np.asarray(pairs, int).reshape(-1, 2))]
        if name == "ragged_all_to_all":
            return [self._ragged(operands, groups)]
        alike = [
            np.asarray([g for g in groups if len(g) == n]) for n in sorted(set(map(len, groups)))
        ]  # a reduction may have groups of different sizes
        results = [self._in_groups(eqn, name, x, alike[0]) for x in operands]
        for others in alike[1:]:
            members = np.isin(np.arange(self.count), others)
            made = [self._in_groups(eqn, name, x, others) for x in operands]
            results = [self.merged(m, r, members) for m, r in zip(made, results, strict=True)]
        return results

    def _in_groups(self, eqn: JaxprEqn, name: str, x: Value, groups: np.ndarray) -> Value:
        size, q = groups.shape[1], eqn.params
        members = moved(lambda a: a[groups], spread(x, self.count))  # groups, members, ...
        if name in ("psum", "psum_invariant"):
            return self._to_all(_sum(eqn, members), groups)
        if name in ("pmax", "pmin"):
            return self._to_all(folded(larger if name == "pmax" else smaller, members, 1), groups)
        if name.startswith("all_gather"):
            join = _unstacked(1 + q["all_gather_dimension"], q["tiled"])
            return self._to_all(moved(join, members), groups)
        axis = q.get("scatter_dimension", q.get("split_axis"))
        pieces = moved(_cut(axis + 2, size), members)  # groups, senders, receivers, ...
        if name == "reduce_scatter":
            made = _sum(eqn, pieces)
            if not q["tiled"]:
                made = moved(lambda a: a.squeeze(axis + 2), made)
        else:
            sent = moved(lambda a: np.swapaxes(a, 1, 2), pieces)  # groups, receivers, senders, ...
            if not q["tiled"]:
                sent = moved(lambda a: a.squeeze(axis + 3), sent)
            made = moved(_unstacked(2 + q["concat_axis"], q["tiled"], 2), sent)
        return self._placed(made, groups)

    def _to_all(self, made: Value, groups: np.ndarray) -> Value:
        """What every member of a group has alike."""
        if len(groups) == 1 and groups.size == self.count:
            return made
        number = np.zeros(self.count, int)
        number[groups] = np.arange(len(groups))[:, None]
        return moved(lambda a: a[number], made)

    def _placed(self, made: Value, groups: np.ndarray) -> Value:
        """What each member of each group has of its own."""
        order = np.argsort(groups.ravel())
        return moved(lambda a: a.reshape(-1, *a.shape[2:])[order], made)

    def _permuted(self, x: Value, pairs: np.ndarray) -> Value:
        def permuted(a: np.ndarray) -> np.ndarray:
            out = np.zeros(a.shape, a.dtype)
            out[pairs[:, 1]] = a[pairs[:, 0]]
            return out

        return moved(permuted, spread(x, self.count))

    def _ragged(self, operands: Sequence[Value], groups: Sequence[Sequence[int]]) -> Value:
        """Rows that devices send to each other; the sizes are data."""
        rows, output, *numbers = (spread(x, self.count) for x in operands)
        starts, counts, ends = (plain(x) for x in numbers[:3])

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


def _sum(eqn: JaxprEqn, members: Value) -> Value:
    made = summed(members, (1,))
    if not isinstance(made, Exact):
        return made
    bits = bits_of(eqn.outvars[0].aval.dtype)
    return replace(made, sum_bits=min(made.sum_bits, bits))


def _unstacked(dim: int, tiled: bool, first: int = 1) -> Callable[[np.ndarray], np.ndarray]:
    """The members' dim, which is `first`, moved to or into `dim`."""

    def unstack(a: np.ndarray) -> np.ndarray:
        a = np.moveaxis(a, first, dim)
        if not tiled:
            return a
        return a.reshape(*a.shape[:dim], a.shape[dim] * a.shape[dim + 1], *a.shape[dim + 2 :])

    return unstack


def _cut(dim: int, parts: int) -> Callable[[np.ndarray], np.ndarray]:
    """A dim cut into parts, whose number becomes dim 2."""

    def cut(a: np.ndarray) -> np.ndarray:
        shape = (*a.shape[:dim], parts, a.shape[dim] // parts, *a.shape[dim + 1 :])
        return np.moveaxis(a.reshape(shape), dim, 2)

    return cut


# ------------------------------------------------------------------------ manual regions


def _to_manual(self: ExactNumbers, eqn: JaxprEqn, operands: Sequence[Value]) -> list[Value]:
    sharding = eqn.params["annotation"].sharding
    tiling = Tiling(sharding, tuple(eqn.invars[0].aval.shape))
    tiles = spread(tiling.cut(operands[0]), self.count)
    if eqn.params["copies"] == "first":
        first = np.isin(np.arange(self.count), sharding.devices[..., 0].ravel())
        tiles = moved(lambda a: np.where(first.reshape(-1, *(1,) * (a.ndim - 1)), a, 0), tiles)
    return [tiles]


def _to_auto(self: ExactNumbers, eqn: JaxprEqn, operands: Sequence[Value]) -> list[Value]:
    sharding = eqn.params["annotation"].sharding
    tiles = spread(operands[0], self.count)
    if eqn.params["copies"] == "all" and sharding.replicas > 1:
        groups = copies_groups(sharding)
        number = np.zeros(self.count, int)
        for n, group in enumerate(groups):
            number[list(group)] = n
        tiles = at(summed_in(groups, tiles), number)
    return [Tiling(sharding, tuple(eqn.params["shape"])).assembled(tiles)]


def _own_number(self: ExactNumbers, eqn: JaxprEqn, operands: Sequence[Value]) -> list[Value]:
    return [np.asarray(eqn.params.get("table", np.arange(self.count)), np.int32)]


def _exchange(self: ExactNumbers, eqn: JaxprEqn, operands: Sequence[Value]) -> list[Value]:
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
        name = "axes" if primitive in _REDUCING else "axis_name"
        params |= {name: (_AXIS,), "axis_index_groups": groups}
    own = eqn.replace(primitive=primitive, params=params)
    return self.collective(own, operands, {_AXIS: self.count})


_MANUAL = {
    to_manual_p: _to_manual, to_auto_p: _to_auto, partition_id_p: _own_number,
    row_of_device_p: _own_number, collective_p: _exchange, over_groups_p: _exchange,
}  # fmt: skip
