"""Gather and scatter: look up and update windows of a tensor at run-time indices.

Batch dims, the dims of the indices and windows as long as their dim split for free in a gather; in
a scatter, batch dims and full windows do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as p

from gshard._jax import scatter_sub_p
from gshard.rules.registry import Context, Factors, Rule, Shape, register
from gshard.tile import Tile

Name = str | None


@dataclass(frozen=True)
class Roles:
    """What the dims of a gather are, or those of a scatter, which is a gather run backwards.

    `windows` is the tensor that lies beside the indices: a gather's result, a scatter's updates.
    Dims are named `b` (batch, in all three), `i` (the indices' own), `w` (windows as long as their
    dim), `k` (dims of the operand that are looked up in) and `o` (windows shorter than their dim).
    """

    sizes: tuple[int, ...]  # of a window, per dim of the operand
    index_map: tuple[int, ...]  # the operand's dim that each component of an index is about
    operand: tuple[str, ...]
    indices: tuple[Name, ...]
    windows: tuple[str, ...]


def roles_of(eqn: JaxprEqn) -> Roles:
    """The roles of the dims of a gather or a scatter."""
    dn: Any = eqn.params["dimension_numbers"]
    operand, indices = (a.aval.shape for a in eqn.invars[:2])
    if eqn.primitive is p.gather_p:
        windows, window_dims, gone = (
            eqn.outvars[0].aval.shape,
            dn.offset_dims,
            dn.collapsed_slice_dims,
        )
        index_map, index_batch = dn.start_index_map, dn.start_indices_batching_dims
    else:
        windows, window_dims = eqn.invars[2].aval.shape, dn.update_window_dims
        gone, index_map = dn.inserted_window_dims, dn.scatter_dims_to_operand_dims
        index_batch = dn.scatter_indices_batching_dims
    batch = {int(d): f"b{j}" for j, d in enumerate(dn.operand_batching_dims)}
    kept = [d for d in range(len(operand)) if d not in gone and d not in batch]
    sizes = [1] * len(operand)
    for d, at in zip(kept, window_dims, strict=True):
        sizes[d] = windows[at]
    full = {d for d in kept if sizes[d] == operand[d]}
    names: list[Name] = [f"i{d}" for d in range(len(indices) - 1)] + [None]
    for j, d in enumerate(index_batch):
        names[d] = f"b{j}"
    beside = iter(names[:-1])
    inside = iter(f"w{d}" if d in full else f"o{d}" for d in kept)
    return Roles(
        tuple(sizes),
        tuple(int(d) for d in index_map),
        tuple(batch.get(d, f"w{d}" if d in full else f"k{d}") for d in range(len(operand))),
        tuple(names),
        tuple(str(next(inside if d in window_dims else beside)) for d in range(len(windows))),
    )


def _free(roles: Roles, names: Sequence[Name], kinds: str) -> list[Name]:
    """The dims of the given kinds; full windows that an index is about have to be whole."""
    indexed = {roles.operand[d] for d in roles.index_map}
    return [n if n and n[0] in kinds and n not in indexed else None for n in names]


def gather_factors(eqn: JaxprEqn) -> Factors:
    """Dims of the indices and full windows reach the result."""
    roles = roles_of(eqn)
    operand, windows = (_free(roles, n, "biw") for n in (roles.operand, roles.windows))
    return Factors.of(eqn, [operand, roles.indices], [windows])


def scatter_factors(eqn: JaxprEqn) -> Factors:
    """Batch dims and full windows are the result's."""
    roles = roles_of(eqn)
    tensors = [_free(roles, n, "bw") for n in (roles.operand, roles.indices, roles.windows)]
    return Factors.of(eqn, tensors, tensors[:1])


def _local_gather(ctx: Context, eqn: JaxprEqn, tiles: list[Tile], shapes: list[Shape]):
    operand, indices = tiles
    sizes = [
        n if name[0] == "w" else s
        for n, s, name in zip(
            operand.array.shape, roles_of(eqn).sizes, roles_of(eqn).operand, strict=True
        )
    ]
    params = eqn.params | {"slice_sizes": tuple(sizes), "indices_are_sorted": False}
    return [eqn.primitive.bind(operand.array, indices.array, **params)]


register(
    Rule(gather_factors, local=_local_gather, doc="batch dims, indices and full windows free"),
    p.gather_p,
)
register(
    Rule(scatter_factors, doc="batch dims and full windows free"),
    p.scatter_p,
    p.scatter_add_p,
    scatter_sub_p,
    p.scatter_mul_p,
    p.scatter_min_p,
    p.scatter_max_p,
)
