"""Equations that say more together than one by one.

A roll is a concatenation of two slices of one tensor. Taken one by one, the slices would be dealt
out to all devices, and put together again; as one operator it is a permute of the rows that pass
from a tile to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Literal, Primitive
from jax.extend.core import primitives as p

concatenate_slices_p = Primitive("concatenate_slices")  # of `windows`: (operand, start, limit)


def fold(eqns: Sequence[JaxprEqn], results: Sequence[Any]) -> list[JaxprEqn]:
    """The equations of a program with these results, slices folded into the concatenations."""
    made = {v: eqn for eqn in eqns for v in eqn.outvars if eqn.primitive is p.slice_p}
    folded = [
        _concatenation(eqn, made) if eqn.primitive is p.concatenate_p else eqn for eqn in eqns
    ]
    live = {v for v in results if not isinstance(v, Literal)}
    kept = []
    for old, eqn in zip(reversed(eqns), reversed(folded), strict=True):
        if old.primitive is p.slice_p and not live.intersection(eqn.outvars):
            continue
        live.update(a for a in eqn.invars if not isinstance(a, Literal))
        kept.append(eqn)
    return kept[::-1]


def _concatenation(eqn: JaxprEqn, made: dict[Any, JaxprEqn]) -> JaxprEqn:
    """`eqn` as a concatenation of windows, if one tensor has several, of most of its rows."""
    dim = eqn.params["dimension"]
    whole = [(atom, 0, atom.aval.shape[dim]) for atom in eqn.invars]
    cuts = [None if isinstance(atom, Literal) else _cut(made.get(atom), dim) for atom in eqn.invars]
    parts = [cut or one for cut, one in zip(cuts, whole, strict=True)]
    windows: list[tuple[int, int, int]] = []
    operands: list[Any] = []
    for (source, start, limit), one in zip(parts, whole, strict=True):
        rows = [l - s for other, s, l in parts if other is source]
        if len(rows) == 1 or 2 * sum(rows) < source.aval.shape[dim]:
            source, start, limit = one
        if not any(source is o for o in operands):
            operands.append(source)
        number = next(i for i, o in enumerate(operands) if o is source)
        windows.append((number, start, limit))
    if len(operands) == len(eqn.invars):
        return eqn
    params = {"dimension": dim, "windows": tuple(windows)}
    return eqn.replace(invars=operands, primitive=concatenate_slices_p, params=params)


def _cut(eqn: JaxprEqn | None, dim: int) -> tuple[Any, int, int] | None:
    """The source and the rows of a slice along `dim` alone."""
    if eqn is None or any(s != 1 for s in eqn.params["strides"] or ()):
        return None
    (source,) = eqn.invars
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    for d, (start, limit, n) in enumerate(zip(starts, limits, source.aval.shape, strict=True)):
        if d != dim and (start, limit) != (0, n):
            return None
    return source, int(starts[dim]), int(limits[dim])
