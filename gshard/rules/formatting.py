"""Data formatting (section 3.3.3): operators that change the size or the order of rows."""

from __future__ import annotations

from jax import lax
from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as p

from gshard._jax import split_p, stack_p, tile_p, unstack_p
from gshard.rules.registry import Context, Factors, Rule, Shape, register
from gshard.tile import Tile


def kept_dims(eqn: JaxprEqn) -> Factors:
    """Dims that keep their size are free; those that change are whole."""
    shape, result = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    same = [all(s == n for s in sizes) for n, sizes in zip(shape, _sizes(eqn), strict=True)]
    for d, pads in enumerate(eqn.params.get("padding_config", ())):
        same[d] = not any(pads)
    names = [f"d{i}" if same[i] else None for i in range(len(result))]
    operands = [names if a.aval.shape else [] for a in eqn.invars]
    return Factors.of(eqn, operands, [names] * len(eqn.outvars))


def _sizes(eqn: JaxprEqn) -> list[list[int]]:
    """Per dim, its sizes in all operands and results (scalars aside)."""
    shapes = [a.aval.shape for a in (*eqn.invars, *eqn.outvars) if a.aval.shape]
    return [list(sizes) for sizes in zip(*shapes, strict=True)]


def stack_factors(eqn: JaxprEqn) -> Factors:
    """The new dim is whole, the others are free."""
    names: list[str | None] = [f"d{i}" for i in range(len(eqn.invars[0].aval.shape))]
    result = list(names)
    result.insert(eqn.params["axis"], None)
    return Factors.of(eqn, [names] * len(eqn.invars), [result])


def unstack_factors(eqn: JaxprEqn) -> Factors:
    """The dim that goes is whole, the others are free."""
    names: list[str | None] = [f"d{i}" for i in range(len(eqn.outvars[0].aval.shape))]
    operand = list(names)
    operand.insert(eqn.params["axis"], None)
    return Factors.of(eqn, [operand], [names] * len(eqn.outvars))


def rev_factors(eqn: JaxprEqn) -> Factors:
    """Reversed dims are whole."""
    turned = eqn.params["dimensions"]
    names = [None if d in turned else f"d{d}" for d in range(len(eqn.invars[0].aval.shape))]
    return Factors.of(eqn, [names], [names])


def _slice_local(ctx: Context, eqn: JaxprEqn, tiles: list[Tile], shapes: list[Shape]):
    (tile,) = tiles
    full = eqn.outvars[0].aval.shape
    starts, limits = list(eqn.params["start_indices"]), list(eqn.params["limit_indices"])
    for d, (n, m) in enumerate(zip(tile.shape, full, strict=True)):
        if n == m:
            starts[d], limits[d] = 0, tile.array.shape[d]
    return [lax.slice(tile.array, starts, limits, eqn.params["strides"])]


def _dynamic_slice_local(ctx: Context, eqn: JaxprEqn, tiles: list[Tile], shapes: list[Shape]):
    return [lax.dynamic_slice(tiles[0].array, [t.array for t in tiles[1:]], shapes[0])]


register(Rule(kept_dims, local=_slice_local, doc="dims that keep their size are free"), p.slice_p)
register(
    Rule(kept_dims, local=_dynamic_slice_local, doc="dims that keep their size are free"),
    p.dynamic_slice_p,
)
register(
    Rule(kept_dims, doc="dims that keep their size are free"),
    p.pad_p,
    p.concatenate_p,
    p.dynamic_update_slice_p,
    split_p,
    tile_p,
)
register(Rule(stack_factors, doc="dims of the operands are free"), stack_p)
register(Rule(unstack_factors, doc="dims of the results are free"), unstack_p)
register(Rule(rev_factors, doc="dims that keep their order are free"), p.rev_p)
