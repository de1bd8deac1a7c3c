"""Recomputation of values from their operands, where moving those sends fewer bytes.

An elementwise operator or a broadcast can run before or after communication. It runs after if its
operands are smaller than its result: 8-bit weights are gathered and then widened, and halo rows are
sent before they are repeated. Operands that are available from another use need not be sent.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as p

from gshard.graph.reason import Reason
from gshard.moving import halo
from gshard.moving.costs import STEP_COST, worked
from gshard.moving.row_windows import Runs, Windows, plan_windows
from gshard.tensors.devices import Place
from gshard.tensors.sharding import Sharding, Split
from gshard.tensors.tile import Tile, byte_size

DEPTH, DEPTH_OF_INDICES = 8, 50  # largest number of operators in a chain that is recomputed

# A planner's equation on local arrays, given as tiles, with results of these shapes
Local = Callable[[Any, JaxprEqn, list[Tile], list[tuple[int, ...]]], Sequence[jax.Array]]

VIEWS = (p.transpose_p, p.rev_p)

REARRANGING = (
    p.broadcast_in_dim_p,
    p.transpose_p,
    p.reshape_p,
    p.concatenate_p,
    p.squeeze_p,
    p.bitcast_convert_type_p,
    p.iota_p,
    p.rev_p,
)


class Made(NamedTuple):
    """A value, with the operator and operands that it was computed by, and how that runs.

    The operator is elementwise, or one of `REARRANGING`: it can be recomputed.
    """

    result: Tile
    eqn: JaxprEqn
    operands: tuple[Tile, ...]
    local: Local
    ctx: Any

    @property
    def is_index(self) -> bool:
        """Whether it consists of integers or masks.

        Indices are often iotas, or computed from values that were replicated, as a sort's results.
        """
        return getattr(self.result.array.dtype, "kind", None) in ("i", "u", "b")  # none: a key

    @property
    def is_reshape(self) -> bool:
        """Whether it is a reshape, which copies nothing, or adds or removes dims of one row."""
        if self.eqn.primitive is p.broadcast_in_dim_p:
            return math.prod(self.operands[0].shape) == math.prod(self.result.shape)
        return self.eqn.primitive in (p.reshape_p, p.squeeze_p)

    @property
    def is_view(self) -> bool:
        """Whether it is a transpose or a reversal of its operand."""
        return self.eqn.primitive in VIEWS

    def inverse(self, result: Tile) -> Made:
        """The operand of a view, as a view of the result."""
        (source,), params = self.operands, dict(self.eqn.params)
        if "permutation" in params:
            params["permutation"] = tuple(np.argsort(params["permutation"]).tolist())
        return Made(source, self.eqn.replace(params=params), (result,), *self[3:])

    def local_forms(self, forms: Iterable[Sharding]) -> set[Sharding]:
        """The shardings of a view that is computed locally from its operand under `forms`."""
        order = self.eqn.params.get("permutation", range(len(self.result.shape)))
        found = {form.project(order) for form in forms}
        return {form for form in found if self.operands_under(form) is not None}

    def gives(self, tile: Tile) -> bool:
        """Whether it is this tile that was computed, of tiles, and not one otherwise sharded."""
        here = self.result.sharding is tile.sharding and tile.is_standard
        return here and all(t.sharding.is_tiling for t in (*self.operands, tile))

    @property
    def depth(self) -> int:
        """The largest number of operators in a chain that it is recomputed by."""
        return DEPTH_OF_INDICES if self.is_index else DEPTH

    def work(self, target: Sharding) -> float:
        """The local work of recomputing it; indices and views are computed where they are read."""
        if self.is_index or self.is_reshape or self.is_view:
            return 0.0
        result = self.result
        return worked(touched=byte_size(target.local_shape(result.shape), result.array.dtype))

    def dims(self) -> list[list[int | None]] | None:
        """For every dim of every operand, the corresponding dim of the result, or None.

        None for an operator without such a correspondence.
        """
        eqn, shape = self.eqn, self.result.shape
        named: Sequence[int | None]
        if eqn.primitive is p.broadcast_in_dim_p:
            named = eqn.params["broadcast_dimensions"]
        elif eqn.primitive is p.transpose_p:
            named = np.argsort(eqn.params["permutation"]).tolist()
        elif eqn.primitive is p.squeeze_p:
            kept = itertools.count()
            gone, rank = eqn.params["dimensions"], len(self.operands[0].shape)
            named = [None if d in gone else next(kept) for d in range(rank)]
        elif eqn.primitive in REARRANGING and eqn.primitive is not p.rev_p:
            return None
        else:
            named = range(len(shape))
        return [
            [
                to if to is not None and n == shape[to] else None
                for n, to in zip(t.shape, named, strict=False)
            ]
            for t in self.operands
        ]

    def operands_under(self, target: Sharding) -> list[Sharding] | None:
        """The shardings of the operands for which the result has `target`."""
        if target.is_replicated:  # any operator on replicated values
            return [Sharding.replicated(t.sharding.rank, target.num_devices) for t in self.operands]
        dims = self.dims()
        turned = self.eqn.params["dimensions"] if self.eqn.primitive is p.rev_p else ()
        if dims is None or target.manual or any(target.splits[d] for d in turned):
            return None
        return [target.project(named) for named in dims]

    def run(self, arrays: Sequence[jax.Array], local: Sequence[int]) -> jax.Array:
        """The operator on local arrays, with a result of the shape `local`."""
        devices = self.result.sharding.num_devices
        tiles = [Tile(a, Sharding.replicated(a.ndim, devices), a.shape) for a in arrays]
        (result,) = self.local(self.ctx, self.eqn, tiles, [tuple(local)])
        return result


# ---------------------------------------------------------------- rows at the borders of tiles


@dataclass(frozen=True)
class Rows:
    """Rows `starts[c]` to `starts[c] + width` of a tile's dim, for the holders of tile c.

    An unsplit dim has the tiles of `split` instead of its own. If `only` some rows of the dim are
    needed, the others are garbage.
    """

    tile: Tile
    dim: int
    starts: np.ndarray
    width: int
    only: tuple[int, int] | None = None
    split: Split | None = None

    @property
    def windows(self) -> Windows:
        """The windows that tiles need of each other."""
        held = Runs.of(self.tile, self.dim).only(self.only)
        return Windows.of(held, self.tile.array.shape[self.dim], self.starts, self.width)

    def own(self, numbers: np.ndarray) -> np.ndarray:
        """For every device the number of its tile, of some that tiles have."""
        split = self.split or self.tile.sharding.splits[self.dim]
        assert split
        return numbers[split.own]


def fetch(
    place: Place,
    tile: Tile,
    dim: int,
    starts: Sequence[int] | np.ndarray,
    width: int,
    reason: Reason,
    only: tuple[int, int] | None = None,
    split: Split | None = None,
) -> jax.Array:
    """Rows `starts[c]` to `starts[c] + width` of the logical `dim` on the holders of tile c.

    They are sent, or recomputed from fewer bytes of the operands. For the tiles of `split`, if
    given: all devices have the rows of an unsplit dim. If `only` some rows are needed, the others
    are garbage as well. A repeated request moves nothing.
    """
    rows = Rows(tile, dim, np.asarray(starts, np.int64), width, only, split)
    _, make = _cheapest(place, rows, DEPTH)
    return make(reason)


_Way = tuple[float, Callable[[Reason], jax.Array]]  # its cost, and its parts


def _cheapest(place: Place, rows: Rows | Tile, depth: int) -> _Way:
    """The cheapest way to get rows, or a tensor that is broadcast along their dim."""
    if isinstance(rows, Tile):
        array = rows.array
        return 0.0, lambda reason: array
    tile, dim = rows.tile, rows.dim
    if tile.sharding.splits[dim] is None:
        first = rows.own(rows.starts)
        return 0.0, lambda reason: halo.window(place, tile.array, dim, first, rows.width)

    def directly(reason: Reason) -> jax.Array:
        return halo.align(place, tile.array, tile.sharding, dim, rows.windows, reason)

    made = tile.value.made if tile.value else None
    if made is None or not depth or made.eqn.primitive is p.rev_p or not made.gives(tile):
        return _sent(rows), directly
    direct, total, ways = _sent(rows), 0.0, []
    needed = _needed(made, rows) if direct else None
    for need in needed or ():
        cost, way = _cheapest(place, need, depth - 1)
        total += cost
        ways.append(way)
    if needed is None or total >= direct:
        return direct, directly

    def recompute(reason: Reason) -> jax.Array:
        local, width = list(tile.array.shape), rows.width
        step = _rows_for_one(made, dim)
        if step > 1:  # rows of the result per row of the operand, possibly more than needed
            (need,) = needed
            assert isinstance(need, Rows)
            width = need.width * step
        local[dim] = width
        x = made.run([way(reason) for way in ways], local)
        first = rows.own(rows.starts % step)
        return halo.window(place, x, dim, first, rows.width) if width > rows.width else x

    return total, recompute


def _sent(rows: Rows) -> float:
    """Bytes that a device sends to fetch rows directly."""
    plan = plan_windows(rows.windows)
    row = rows.tile.nbytes // max(rows.tile.array.shape[rows.dim], 1)
    return plan.sent * row + STEP_COST * plan.steps if plan.sent else 0.0


def _needed(made: Made, rows: Rows) -> list[Rows | Tile] | None:
    """The rows of the operands that are needed; None if their shardings differ."""
    primitive, dim, result = made.eqn.primitive, rows.dim, made.result
    if primitive is p.reshape_p:
        return _before_reshape(made, rows)
    if primitive is p.concatenate_p:
        if made.eqn.params["dimension"] == dim:
            return None
        dims: Any = [list(range(len(result.shape)))] * len(made.operands)
    else:
        dims = made.dims()
    if dims is None:
        return None
    found: list[Rows | Tile] = []
    for tile, named in zip(made.operands, dims, strict=True):
        for d, to in enumerate(named):
            whole = to is None or (to == dim and tile.sharding.splits[d] is None)
            here, there = tile.sharding.splits[d], result.sharding.splits[to or 0]
            if here is not there and not whole:
                return None
        if dim in named:
            split = rows.split or rows.tile.sharding.splits[dim]
            found.append(replace(rows, tile=tile, dim=named.index(dim), split=split))
        else:
            found.append(tile)
    return found


def _before_reshape(made: Made, rows: Rows) -> list[Rows | Tile] | None:
    """For a reshape that merges the split dim with minor ones: its rows that are needed.

    None for any other reshape, or if another dim is split.
    """
    (tile,), result, dim = made.operands, made.result, rows.dim
    source, step = _dim_before_reshape(made, dim), _rows_for_one(made, dim)
    others = [s for d, s in enumerate(tile.sharding.splits) if d != source]
    others += [s for d, s in enumerate(result.sharding.splits) if d != dim]
    if not step or any(others) or tile.sharding.splits[source] is not result.sharding.splits[dim]:
        return None
    first = rows.starts // step
    width = int((-(-(rows.starts + rows.width) // step) - first).max())
    return [Rows(tile, source, first, width)]


def _rows_for_one(made: Made, dim: int) -> int:
    """The rows of the result per row of the operand; 0 if dims are not simply merged."""
    if made.eqn.primitive is not p.reshape_p:
        return 1
    sizes, rows = made.operands[0].shape, made.result.shape[dim]
    source = _dim_before_reshape(made, dim)
    if made.eqn.params["dimensions"] is not None or rows % sizes[source]:
        return 0
    step = rows // sizes[source]
    joined = [math.prod(sizes[source + 1 : end]) for end in range(source + 1, len(sizes) + 1)]
    return step if step in joined else 0


def _dim_before_reshape(made: Made, dim: int) -> int:
    """The operand's last dim that begins where `dim` of the result does."""
    before, sizes = math.prod(made.result.shape[:dim]), made.operands[0].shape
    starts = [math.prod(sizes[:d]) for d in range(len(sizes))]
    return max((d for d, start in enumerate(starts) if start == before), default=0)
