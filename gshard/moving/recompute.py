"""Recomputation of values from their operands, where moving those sends fewer bytes.

An elementwise operator or a broadcast can run before or after communication. It runs after if its
operands are smaller than its result: 8-bit weights are gathered and then widened, and halo rows are
sent before they are repeated (`fetch`). Operands that are available from another use need not be
sent.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as p

from gshard.graph.row_map import Layer
from gshard.moving.costs import worked
from gshard.tensors.sharding import Sharding
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

    The operator is elementwise, or one of `REARRANGING`: it can be recomputed. So can rows that are
    looked up in a table, which may have fewer: `rows_of` gives the dims of both. Or it is a row
    map, of which `layers_of` gives the layers: windows of its rows can be painted again.
    """

    result: Tile
    eqn: JaxprEqn
    operands: tuple[Tile, ...]
    local: Local | None
    ctx: Any
    layers_of: Callable[[JaxprEqn], Sequence[Layer]] | None = None
    rows_of: Callable[[JaxprEqn], list[list[int | None]]] | None = None

    @property
    def is_index(self) -> bool:
        """Whether it consists of integers or masks.

        Indices are often iotas, or computed from values that were replicated, as a sort's results.
        """
        kind = getattr(self.result.array.dtype, "kind", None)  # none: a key
        return bool(self.local) and kind in ("i", "u", "b")

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
        same = tile.is_standard or tile.array.shape == self.result.array.shape
        here = self.result.sharding is tile.sharding and same
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
        elif self.rows_of or (eqn.primitive in REARRANGING and eqn.primitive is not p.rev_p):
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
        if self.local is None:
            return None
        if target.is_replicated:  # any operator on replicated values
            return [Sharding.replicated(t.sharding.rank, target.num_devices) for t in self.operands]
        dims = self.rows_of(self.eqn) if self.rows_of else self.dims()
        turned = self.eqn.params["dimensions"] if self.eqn.primitive is p.rev_p else ()
        if dims is None or target.manual or any(target.splits[d] for d in turned):
            return None
        return [target.project(named) for named in dims]

    def run(self, arrays: Sequence[jax.Array], local: Sequence[int]) -> jax.Array:
        """The operator on local arrays, with a result of the shape `local`."""
        devices = self.result.sharding.num_devices
        tiles = [Tile(a, Sharding.replicated(a.ndim, devices), a.shape) for a in arrays]
        assert self.local
        (result,) = self.local(self.ctx, self.eqn, tiles, [tuple(local)])
        return result
