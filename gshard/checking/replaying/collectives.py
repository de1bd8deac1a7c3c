"""What collectives do, on lists of all devices' values; and what each device sends and receives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Primitive
from jax.extend.core import primitives as p

from gshard._jax import private_primitives

Tiles = Sequence[Any]  # a value on every device; None where it does not run
Sizes = Mapping[str, int]  # of the axes of the mesh


def _axes(eqn: JaxprEqn) -> tuple[str, ...]:
    axes = eqn.params.get("axes", eqn.params.get("axis_name"))
    return (axes,) if isinstance(axes, str) else tuple(axes)


def groups_of(eqn: JaxprEqn, sizes: Sizes) -> list[tuple[int, ...]]:
    """The groups of devices that take part in a collective together, in their order."""
    axes = _axes(eqn)
    grid = np.arange(int(np.prod(list(sizes.values())))).reshape(tuple(sizes.values()))
    numbers = [list(sizes).index(name) for name in axes]
    others = [d for d in range(grid.ndim) if d not in numbers]
    members = int(np.prod([grid.shape[d] for d in numbers]))
    rows = grid.transpose(*others, *numbers).reshape(-1, members)
    listed = eqn.params.get("axis_index_groups")
    if not listed:
        return [tuple(row.tolist()) for row in rows]
    return [tuple(int(row[i]) for i in group) for row in rows for group in listed]


def rank_in(eqn: JaxprEqn, sizes: Sizes) -> np.ndarray:
    """The number of every device along the axes of an `axis_index`."""
    rank = np.zeros(int(np.prod(list(sizes.values()))), np.int32)
    for group in groups_of(eqn, sizes):
        rank[list(group)] = np.arange(len(group))
    return rank


# ------------------------------------------------- one group: the members' arrays in, theirs out


def _sum(parts: list[np.ndarray]) -> np.ndarray:
    """In the members' order; what is narrower than 32 bits is rounded once, as compilers do."""
    dtype = parts[0].dtype
    narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    total = parts[0].astype(np.float32) if narrow else parts[0]
    for part in parts[1:]:
        total = total + part
    return np.asarray(total).astype(dtype)


def _all_reduce(eqn: JaxprEqn, parts: list[np.ndarray]) -> list[np.ndarray]:
    if eqn.primitive in (p.pmax_p, p.pmin_p):
        made = (np.maximum if eqn.primitive is p.pmax_p else np.minimum).reduce(parts)
    else:
        made = _sum(parts)
    return [made] * len(parts)


def _all_gather(eqn: JaxprEqn, parts: list[np.ndarray]) -> list[np.ndarray]:
    join = np.concatenate if eqn.params["tiled"] else np.stack
    return [join(parts, axis=eqn.params["all_gather_dimension"])] * len(parts)


def _pieces(eqn: JaxprEqn, part: np.ndarray, count: int) -> list[np.ndarray]:
    """What a device sends to each member of its group, itself included."""
    axis = eqn.params.get("scatter_dimension", eqn.params.get("split_axis"))
    pieces = np.split(part, count, axis)
    return pieces if eqn.params["tiled"] else [np.squeeze(x, axis) for x in pieces]


def _reduce_scatter(eqn: JaxprEqn, parts: list[np.ndarray]) -> list[np.ndarray]:
    pieces = [_pieces(eqn, part, len(parts)) for part in parts]
    return [_sum(list(column)) for column in zip(*pieces, strict=True)]


def _all_to_all(eqn: JaxprEqn, parts: list[np.ndarray]) -> list[np.ndarray]:
    pieces = [_pieces(eqn, part, len(parts)) for part in parts]
    join = np.concatenate if eqn.params["tiled"] else np.stack
    return [join(column, axis=eqn.params["concat_axis"]) for column in zip(*pieces, strict=True)]


_parallel = functools.partial(private_primitives, "lax.parallel")
_SCATTERS = _parallel("reduce_scatter_p")
_SUMS = (p.psum_p, *_parallel("psum_invariant_p"))
_IN_GROUPS: dict[Primitive, Callable[[JaxprEqn, list[np.ndarray]], list[np.ndarray]]] = {
    **dict.fromkeys((*_SUMS, p.pmax_p, p.pmin_p), _all_reduce),
    **dict.fromkeys((p.all_gather_p, *_parallel("all_gather_invariant_p")), _all_gather),
    **dict.fromkeys(_SCATTERS, _reduce_scatter),
    p.all_to_all_p: _all_to_all,
}
RUN_TOGETHER = {*_IN_GROUPS, p.ppermute_p, p.ragged_all_to_all_p}


# ------------------------------------------------------------------------ all devices


def run_collective(eqn: JaxprEqn, operands: Sequence[Tiles], sizes: Sizes) -> list[list[Any]]:
    """The results of a collective on every device that takes part."""
    if eqn.primitive is p.ppermute_p:
        return [_permuted(eqn, operands[0], sizes)]
    if eqn.primitive is p.ragged_all_to_all_p:
        return [_ragged(eqn, operands, sizes)]
    combine = _IN_GROUPS[eqn.primitive]
    results: list[list[Any]] = []
    for operand in operands:
        result: list[Any] = [None] * len(operand)
        for group in groups_of(eqn, sizes):
            if operand[group[0]] is None:
                continue
            made = combine(eqn, [np.asarray(operand[d]) for d in group])
            for device, array in zip(group, made, strict=True):
                result[device] = array
        results.append(result)
    return results


def _pairs(eqn: JaxprEqn, sizes: Sizes) -> list[tuple[int, int]]:
    """The (source, destination) pairs of a permutation, as numbers of devices."""
    groups = groups_of(eqn, sizes)
    return [(group[a], group[b]) for group in groups for a, b in eqn.params["perm"]]


def _permuted(eqn: JaxprEqn, operand: Tiles, sizes: Sizes) -> list[Any]:
    result = [None if x is None else np.zeros_like(np.asarray(x)) for x in operand]
    for source, target in _pairs(eqn, sizes):
        if operand[source] is not None:
            result[target] = np.asarray(operand[source])
    return result


def _ragged(eqn: JaxprEqn, operands: Sequence[Tiles], sizes: Sizes) -> list[Any]:
    """Rows that devices send to each other; the sizes are data."""
    rows, output, starts, counts, ends, _ = operands
    result = [None if x is None else np.array(x) for x in output]
    for group in groups_of(eqn, sizes):
        for source in group:
            if rows[source] is None:
                continue
            sent = np.asarray(rows[source])
            per_member = len(starts[source]) // len(group)
            for number, (a, n, b) in enumerate(
                zip(starts[source], counts[source], ends[source], strict=True)
            ):
                target = result[group[number // per_member]]
                assert target is not None
                target[int(b) : int(b) + int(n)] = sent[int(a) : int(a) + int(n)]
    return result


def exchanged(
    eqn: JaxprEqn, operand: Tiles, device: int, sizes: Sizes
) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
    """What a device sends to which others, and what it receives from which.

    That is the meaning of a collective; how messages are routed is up to the hardware.
    """
    if eqn.primitive is p.ppermute_p:
        pairs = [(a, b) for a, b in _pairs(eqn, sizes) if a != b]
        sent = {b: np.asarray(operand[a]) for a, b in pairs if a == device}
        return sent, {a: np.asarray(operand[a]) for a, b in pairs if b == device}
    group = next(g for g in groups_of(eqn, sizes) if device in g)
    others = [d for d in group if d != device]
    if eqn.primitive in (*_SCATTERS, p.all_to_all_p):
        pieces = {d: _pieces(eqn, np.asarray(operand[d]), len(group)) for d in group}
        mine = group.index(device)
        sent = {d: pieces[device][group.index(d)] for d in others}
        return sent, {d: pieces[d][mine] for d in others}
    own = np.asarray(operand[device])
    return dict.fromkeys(others, own), {d: np.asarray(operand[d]) for d in others}
