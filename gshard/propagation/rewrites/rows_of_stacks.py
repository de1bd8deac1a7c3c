"""Rows of a stack that devices hold one by one: read together, they are collected by one AllToAll.

`u[0]`, `u[1]` and so on are slices, each of which would be sent by itself. If all rows of a tensor
are read so, along a dim that is split between all devices, they are the results of one `unstack`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn
from jax.extend.core import primitives as p

from gshard._jax import Var, unstack_p
from gshard.capture.simplify.painting import reshaped
from gshard.graph import at_every_level, replacing
from gshard.graph.source import source_of
from gshard.tensors.sharding import Sharding


@at_every_level
def unstack_rows(
    jaxpr: Jaxpr, shardings: Mapping[Any, Sharding], memory_limit: int, remarks: list[str]
) -> Jaxpr:
    """The program with the rows of such tensors as results of one equation each."""
    cuts: dict[Any, dict[JaxprEqn, int]] = {}  # by tensors and dims: slices of one row, which one
    for eqn in jaxpr.eqns:
        if eqn.primitive is p.slice_p and (axis := _axis(eqn, shardings)) is not None:
            row = eqn.params["start_indices"][axis]
            cuts.setdefault((eqn.invars[0], axis), {})[eqn] = row
    rows: dict[JaxprEqn, JaxprEqn] = {}  # in the place of slices
    first: dict[JaxprEqn, JaxprEqn] = {}
    for (var, axis), found in cuts.items():
        if len(set(found.values())) == var.aval.shape[axis] > 1:
            eqn = next(iter(found))
            shape = (*var.aval.shape[:axis], *var.aval.shape[axis + 1 :])
            results = [Var(var.aval.update(shape=shape)) for _ in range(var.aval.shape[axis])]
            unstack = replacing(eqn, unstack_p, [var], None, axis=axis)
            first[eqn] = unstack.replace(outvars=results)
            rows |= {c: reshaped(c, results[row], c.outvars[0]) for c, row in found.items()}
            remarks.append(f"at {source_of(eqn)}: {len(results)} rows are collected at once")
    if not first:
        return jaxpr
    eqns = [e for n in jaxpr.eqns for e in (first.get(n), rows.get(n, n)) if e is not None]
    return jaxpr.replace(eqns=eqns)


def _axis(eqn: JaxprEqn, shardings: Mapping[Any, Sharding]) -> int | None:
    """The dim of which a slice takes one row, if that is split between all devices, alone."""
    (var,), (out,) = eqn.invars, eqn.outvars
    here, shapes = shardings[var], zip(var.aval.shape, out.aval.shape, strict=True)
    cut = [d for d, (before, after) in enumerate(shapes) if before != after]
    if len(cut) != 1 or out.aval.shape[cut[0]] != 1 or not here.is_tiling or here.idle:
        return None
    return cut[0] if here.tiles[cut[0]] == here.num_devices else None
