"""Indexing: windows of a tensor at indices known at run time. Gather is here, see also scatter.

A gather takes a window of the operand for every index; a scatter is its transpose. Batch dims, the
indices' own dims and windows as long as their dim need no communication. Along a split dim that is
indexed, every device handles the indices that hit its own rows: the table is not moved.
Out-of-range indices are clamped or dropped by the logical size, whatever the tiles are.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as p
from jax.lax import GatherScatterMode

from gshard.moving.partial import combine_disjoint
from gshard.rules.base.rule import Context, Doc, Linear, Way, on_moved, rule
from gshard.rules.base.unreduced import in_place
from gshard.rules.base.ways import by_factors
from gshard.tensors import padding
from gshard.tensors.factors import Assignment, Factors
from gshard.tensors.keys import is_key_type
from gshard.tensors.sharding import Sharding, Shardings, Targets
from gshard.tensors.tile import Arrays, HeldRows, Tile, Tiles, byte_size


@dataclass(frozen=True)
class Roles:
    """The roles of the dims of a gather or scatter.

    `windows` is the tensor with one window per index: a gather's result, a scatter's updates.
    Dims are named `b` (batch, in all three), `i` (the indices' own), `w` (a window as long as its
    dim), `k` (dims of the operand that are looked up in) and `o` (a window shorter than its dim).
    """

    sizes: tuple[int, ...]  # of a window, per dim of the operand
    index_map: tuple[int, ...]  # the operand's dim that each component of an index is about
    operand: tuple[str, ...]
    indices: tuple[str | None, ...]
    windows: tuple[str, ...]

    @property
    def looked_up(self) -> list[int]:
        """The `k` dims of the operand."""
        return [d for d, name in enumerate(self.operand) if name[0] == "k"]

    @property
    def beside(self) -> list[int]:
        """The dims of `windows` that are the indices'."""
        return [d for d, name in enumerate(self.windows) if name[0] in "bi"]


def roles_of(eqn: JaxprEqn) -> Roles:
    """The roles of the dims of a gather or a scatter."""
    dn: Any = eqn.params["dimension_numbers"]
    operand, indices = (a.aval.shape for a in eqn.invars[:2])
    if eqn.primitive is p.gather_p:
        windows, window_dims = eqn.outvars[0].aval.shape, dn.offset_dims
        gone, index_map = dn.collapsed_slice_dims, dn.start_index_map
        index_batch = dn.start_indices_batching_dims
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
    names: list[str | None] = [f"i{d}" for d in range(len(indices) - 1)] + [None]
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


def without(kinds: str, names: Sequence[str | None]) -> list[str | None]:
    """The names without those of some roles: dims that must be unsplit."""
    return [n if n and n[0] not in kinds else None for n in names]


# ---------------------------------------------------------------- windows on a tile


@dataclass(frozen=True)
class IndexedWindows:
    """The windows of a gather or scatter on this device's tile, of factors split as `chosen`."""

    ctx: Context
    roles: Roles
    chosen: Assignment
    operand: Tile
    indices: Tile

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """The size of this device's part of a window, per dim of the operand."""
        sizes = []
        for d, name in enumerate(self.roles.operand):
            part, size = self.chosen.get(f"o{d}"), self.roles.sizes[d]
            part_size = -(-size // part.tiles) if part else size
            sizes.append(self.operand.array.shape[d] if name[0] == "w" else part_size)
        return tuple(sizes)

    @functools.cached_property
    def cut(self) -> list[int]:
        """The indexed dims along which a window may cross the border of a tile."""
        chosen = self.chosen
        return [d for d in self.roles.looked_up if chosen.get(f"k{d}") or chosen.get(f"o{d}")]

    @property
    def starts(self) -> tuple[dict[int, jax.Array], jax.Array]:
        """Per indexed dim, where windows start in this tile; and which are within the tensor.

        Starts are clamped to the tensor; those of windows on other devices are outside of the tile.
        """
        operand, indices, place = self.operand, self.indices.array, self.ctx.place
        lead = indices.shape[:-1]
        starts = {d: jnp.zeros(lead, jnp.int32) for d in self.roles.looked_up}
        inside = jnp.ones(lead, bool)
        for component, d in enumerate(self.roles.index_map):
            index = lax.index_in_dim(indices, component, axis=-1, keepdims=False)
            limit = min(operand.shape[d] - self.roles.sizes[d], jnp.iinfo(index.dtype).max)
            first, last = index.dtype.type(0), index.dtype.type(limit)
            inside &= (index >= first) & (index <= last)
            if d in starts:
                starts[d] = lax.clamp(first, index, last).astype(jnp.int32)
        for d in starts:
            part = self.chosen.get(f"o{d}")
            if part:
                starts[d] += place.lookup(part.own * self.sizes[d])
            starts[d] -= operand.offset(place, d)
        return starts, inside

    @property
    def with_margins(self) -> jax.Array:
        """The operand with room along the dims that are `cut`: a window may overlap by one row."""
        x = self.operand.array
        for d in self.cut:
            more = self.sizes[d] - 1
            x = padding.pad(x, d, more, more) if more else x
        return x


# ---------------------------------------------------------------- gather


def gather_factors(eqn: JaxprEqn) -> Factors:
    """Dims of the indices and full windows reach the result; a dim looked up in is summed over.

    The sum has one term that is not zero, from the device that holds the row: it is one of bits,
    in types that have no zero too.
    """
    roles = roles_of(eqn)
    operand, windows = roles.operand, roles.windows
    if is_key_type(eqn.outvars[0].aval.dtype):
        return Factors.of(eqn, [without("k", operand), roles.indices], [without("o", windows)])
    kind = "or" if eqn.outvars[0].aval.dtype == bool else "sum"
    summed = {name: kind for name in operand if name[0] == "k"}
    return replace(Factors.of(eqn, [operand, roles.indices], [windows]), reduced=summed)


def gather_ways(eqn: JaxprEqn, shardings: Shardings, targets: Targets, limit: int) -> Iterator[Way]:
    """By factors, where the table is not too large.

    A table is split because it is large: it may be resharded, but is not gathered if that would
    take more memory than it or the entire result does (or than the limit), even if it sends less.
    A small table with many indices is gathered: the partial sums of the result, which every device
    would hold instead, would be larger.
    """
    table, result = eqn.invars[0].aval, eqn.outvars[0].aval

    def held(sharding: Sharding) -> int:
        return byte_size(sharding.local_shape(table.shape), table.dtype)

    ways = by_factors(eqn, gather_factors(eqn), shardings, targets)
    if is_key_type(result.dtype):
        yield from ways
        return
    most = max(held(shardings[0]), min(byte_size(result.shape, result.dtype), limit))
    yield from (way for way in ways if held(way.operands[0]) <= most)


def _linear(eqn: JaxprEqn) -> Sequence[Sequence[int]]:
    """Linear in the table, unless there is a number for what is not in it."""
    fill = eqn.params["mode"] == GatherScatterMode.FILL_OR_DROP and eqn.params["fill_value"]
    return () if fill else ((0,),)


def _on_unreduced(ctx: Context, eqn: JaxprEqn, tiles: Sequence[Tile]) -> Tile | None:
    """Rows of a table that every device has all rows of, up to a sum."""
    splits, looked_up = tiles[0].sharding.splits, roles_of(eqn).looked_up
    return None if any(splits[d] for d in looked_up) else in_place(ctx, eqn, tiles)


def _gather_local(ctx: Context, eqn: JaxprEqn, tiles: Tiles, shapes: Sequence[Any]) -> Arrays:
    """From tables with all rows; windows are as long as the tile where they are as their dim.

    With `shapes` rows are made again: some may be others, in another order.
    """
    windows = IndexedWindows(ctx, roles_of(eqn), {}, *tiles)
    in_order = eqn.params["indices_are_sorted"] and not (shapes or tiles[1].padded_dims())
    params = eqn.params | {"slice_sizes": windows.sizes, "indices_are_sorted": in_order}
    return [eqn.primitive.bind(*(t.array for t in tiles), **params)]


@rule(
    p.gather_p,
    factors=gather_factors,
    ways=gather_ways,
    local=_gather_local,
    linear=Linear(_linear, _on_unreduced),
    doc=Doc(
        free="batch dims, indices, full windows",
        gather="a dim looked up in: AllReduce or ReduceScatter of the result",
    ),
)
@on_moved
def _gather(ctx: Context, eqn: JaxprEqn, way: Way, tiles: Tiles, targets: Targets) -> Tiles:
    """Look up this device's rows; if they are split, a sum combines what the devices found."""
    shape, dtype = tuple(eqn.outvars[0].aval.shape), eqn.outvars[0].aval.dtype
    if 0 in shape and not is_key_type(dtype):
        return [Tile(jnp.zeros(targets[0].local_shape(shape), dtype), targets[0], shape)]
    windows = IndexedWindows(ctx, roles_of(eqn), way.how.chosen, *tiles)
    if not windows.cut:
        (array,) = _gather_local(ctx, eqn, tiles, ())
        return [Tile(array, way.results[0], shape)]
    array, held = _look_up(eqn, windows)
    part = Tile(array, way.results[0], shape, "gather", held)
    if ctx.stays_unreduced(eqn.outvars[0], part, way.kind):
        return [part]
    return [combine_disjoint(ctx.place, part, targets[0])]


def held_dims(roles: Roles, chosen: Assignment) -> tuple[int, ...]:
    """The dims of the result in which devices hold different rows of what is looked up."""
    cut = [d for d in roles.looked_up if chosen.get(f"k{d}") or chosen.get(f"o{d}")]
    parts = any(f"o{d}" in roles.windows for d in cut)  # of a window may be elsewhere
    return tuple(range(len(roles.windows)) if parts else roles.beside)


def _look_up(eqn: JaxprEqn, windows: IndexedWindows) -> tuple[jax.Array, HeldRows]:
    """The elements of the windows in this tile, and zeros for the others; and which those are."""
    (starts, inside), sizes, roles = windows.starts, windows.sizes, windows.roles
    x = windows.with_margins
    clamped = [
        lax.clamp(
            np.int32(0),
            start + (sizes[d] - 1 if d in windows.cut else 0),
            np.int32(x.shape[d] - sizes[d]),  # a number of Python is 64 bits wide under `x64`
        )
        for d, start in starts.items()
    ]
    params = eqn.params | {
        "dimension_numbers": eqn.params["dimension_numbers"]._replace(
            start_index_map=tuple(starts)
        ),
        "slice_sizes": sizes,
        "indices_are_sorted": False,
        "unique_indices": False,
        "mode": GatherScatterMode.PROMISE_IN_BOUNDS,
        "fill_value": None,
    }
    out = p.gather_p.bind(x, jnp.stack(clamped, axis=-1), **params)

    def beside(values: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(values, out.shape, roles.beside)

    dims = held_dims(roles, windows.chosen)
    parts = len(dims) == out.ndim  # of a window may be elsewhere
    held = jnp.ones([out.shape[d] for d in dims], bool)
    if eqn.params["mode"] == GatherScatterMode.FILL_OR_DROP:
        fill = lax.full_like(out, eqn.params["fill_value"])
        out = lax.select(beside(inside), out, fill)
    for d, start in starts.items():
        if windows.chosen.get(f"k{d}"):
            row = beside(start) if parts else start
            if f"o{d}" in roles.windows:
                row += lax.broadcasted_iota(jnp.int32, out.shape, roles.windows.index(f"o{d}"))
            held &= (row >= 0) & (row < windows.operand.array.shape[d])
    mine = lax.broadcast_in_dim(held, out.shape, dims)
    return lax.select(mine, out, padding.blank(out.shape, out.dtype)), HeldRows(held, dims)
