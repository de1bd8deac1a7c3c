"""Slices at run-time offsets: dynamic_slice and dynamic_update_slice."""

from __future__ import annotations

from jax import lax
from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as p

from gshard.rules.registry import Context, Factors, Rule, Shape, register
from gshard.tile import Tile


def kept_dims(eqn: JaxprEqn) -> Factors:
    """Dims that keep their size are free; those that change are whole."""
    rank = len(eqn.outvars[0].aval.shape)
    arrays = [a.aval.shape for a in (*eqn.invars, *eqn.outvars) if len(a.aval.shape) == rank]
    names = [f"d{i}" if len({s[i] for s in arrays}) == 1 else None for i in range(rank)]
    operands = [names if len(a.aval.shape) == rank else [] for a in eqn.invars]
    return Factors.of(eqn, operands, [names])


def _dynamic_slice_local(ctx: Context, eqn: JaxprEqn, tiles: list[Tile], shapes: list[Shape]):
    return [lax.dynamic_slice(tiles[0].array, [t.array for t in tiles[1:]], shapes[0])]


register(
    Rule(kept_dims, local=_dynamic_slice_local, doc="dims that keep their size are free"),
    p.dynamic_slice_p,
)
register(Rule(kept_dims, doc="dims that keep their size are free"), p.dynamic_update_slice_p)
