"""Pallas kernels: a dim of the grid whose programs read and write their own blocks is free.

A kernel runs once for each point of its grid, on one block of each array. If the block index along
some dim is the program id along some dim of the grid, for all results and all operands with that
dim, the programs are independent: each device runs those of its own blocks. That holds for the dims
that `vmap` adds, and for batch and head dims of attention kernels. All other dims are gathered.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from gshard._jax import private_primitives
from gshard.graph.regions import walk
from gshard.rules.base.rule import Context, Doc, Rule, register
from gshard.tensors.factors import Dim, Factors, Shape
from gshard.tensors.tile import Tiles


def grid_dims(eqn: JaxprEqn) -> Factors:
    """A factor for each free dim of the grid; a dim of several rows per block has one for those."""
    mapping = eqn.params["grid_mapping"]
    sizes: dict[str, int] = {}
    tensors: list[tuple[Dim, ...]] = []
    free = _free_dims(eqn)
    for block in mapping.block_mappings:
        dims: list[Dim] = []
        for rows, number in zip(_block_shape(block), _numbers(block), strict=True):
            if number not in free:
                dims.append(())
                continue
            sizes[f"g{number}"] = mapping.grid[number]
            inside = f"g{number}r{rows}"
            sizes[inside] = rows
            dims.append((f"g{number}",) if rows == 1 else (f"g{number}", inside))
        tensors.append(tuple(dims))
    count = len(eqn.invars)
    if len(tensors) != count + len(eqn.outvars):  # operands without blocks: nothing is free
        tensors = [((),) * len(a.aval.shape) for a in (*eqn.invars, *eqn.outvars)]
    replicated = frozenset(f for f in sizes if "r" in f)
    return Factors(tuple(tensors[:count]), tuple(tensors[count:]), sizes, replicated=replicated)


def _block_shape(block: Any) -> list[int]:
    """The rows of a block along each dim; 0 where blocks are not laid side by side."""
    return [
        1 if type(b).__name__ in ("Squeezed", "NoneType") else getattr(b, "block_size", 0)
        for b in block.block_shape
    ]


def _numbers(block: Any) -> list[int | None]:
    """For each dim of an array the dim of the grid that numbers its blocks, if one alone does."""
    jaxpr = block.index_map_jaxpr.jaxpr
    place = {v: i for i, v in enumerate(jaxpr.invars)}
    return [None if isinstance(v, Literal) else place.get(v) for v in jaxpr.outvars]


def _free_dims(eqn: JaxprEqn) -> set[int]:
    """The dims of the grid whose programs can run on different devices."""
    params, mapping = eqn.params, eqn.params["grid_mapping"]
    if mapping.num_index_operands or params["input_output_aliases"] or params.get("mesh"):
        return set()
    added = set(mapping.vmapped_dims)
    own = [g for g in range(len(mapping.grid)) if g not in added]  # those that the kernel knows
    asked = {own[axis] for axis in _program_ids(params["jaxpr"])}
    free = set()
    for g, size in enumerate(mapping.grid):
        if not isinstance(size, int) or g in asked:
            continue
        if g not in added and mapping.scratch_avals:
            continue  # a program may read what an earlier one wrote
        if all(_own_blocks(b, g, size) for b in mapping.block_mappings) and all(
            g in _numbers(b) for b in mapping.block_mappings[mapping.num_inputs :]
        ):
            free.add(g)
    return free


def _own_blocks(block: Any, g: int, size: int) -> bool:
    """Whether the blocks of an array are those of dim `g` of the grid, one each, or not of it."""
    jaxpr = block.index_map_jaxpr.jaxpr
    variable = jaxpr.invars[g]
    if any(a is variable for eqn in jaxpr.eqns for a in eqn.invars):
        return False
    dims = [d for d, number in enumerate(_numbers(block)) if number == g]
    shape, rows = block.array_aval.shape, _block_shape(block)
    return len(dims) <= 1 and all(rows[d] and rows[d] * size == shape[d] for d in dims)


def _program_ids(jaxpr: Jaxpr) -> set[int]:
    """The dims of the grid along which the kernel asks for its number or their count."""
    asking = ("program_id", "num_programs")
    inside = walk(getattr(jaxpr, "jaxpr", jaxpr))
    return {eqn.params["axis"] for eqn in inside if eqn.primitive.name in asking}


def _local(ctx: Context, eqn: JaxprEqn, tiles: Tiles, shapes: list[Shape]) -> list[Any]:
    """The kernel on a device's own blocks: a smaller grid over smaller arrays."""
    mapping, factors = eqn.params["grid_mapping"], grid_dims(eqn)
    locals_ = [*(t.array.shape for t in tiles), *shapes]
    grid, blocks = list(mapping.grid), []
    for block, dims, shape in zip(
        mapping.block_mappings, (*factors.operands, *factors.results), locals_, strict=True
    ):
        for dim, n, rows in zip(dims, shape, _block_shape(block), strict=True):
            if dim:
                grid[int(dim[0][1:])] = n // rows
        blocks.append(replace(block, array_aval=block.array_aval.update(shape=tuple(shape))))
    params = eqn.params | {
        "cost_estimate": _share(eqn.params.get("cost_estimate"), mapping.grid, grid),
        "grid_mapping": replace(mapping, grid=tuple(grid), block_mappings=tuple(blocks)),
        "out_avals": tuple(
            v.aval.update(shape=s) for v, s in zip(eqn.outvars, shapes, strict=True)
        ),
    }
    return eqn.primitive.bind(*(t.array for t in tiles), **params)


def _share(cost: Any, grid: tuple[Any, ...], own: list[Any]) -> Any:
    """The author's cost estimate, for a device's part of the grid."""
    if cost is None or tuple(own) == tuple(grid):
        return cost
    whole, part = (math.prod(n for n in g if isinstance(n, int)) for g in (grid, own))
    scaled = {f.name: getattr(cost, f.name) * part // whole for f in fields(cost)}
    return replace(cost, **scaled)


register(
    Rule(
        grid_dims,
        local=_local,
        doc=Doc(
            free="dims of the grid whose programs have blocks of their own",
            gather="others: AllGather",
        ),
    ),
    *private_primitives("pallas.pallas_call", "pallas_call_p"),
)
