"""Recomputation of values from their operands, where moving those sends fewer bytes.

An elementwise operator or a broadcast can run before or after communication. It runs after if its
operands are smaller than its result: 8-bit weights are gathered and then widened, and halo rows are
sent before they are repeated (`fetch`). Operands that are available from another use need not be
sent.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as p

from gshard.graph.row_map import Layer
from gshard.moving.costs import worked
from gshard.tensors.factors import Factors
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
    p.gather_p,  # of rows from a table, which may have fewer
)


@dataclass(eq=False)  # not frozen: there is one for most values
class Made:
    """A value, with the operator and operands that it was computed by, and how that runs.

    The operator is elementwise, or one of `REARRANGING`: it can be recomputed. Or it is a row map,
    of which `layers_of` gives the layers: windows of its rows can be painted again.
    """

    result: Tile
    eqn: JaxprEqn
    operands: tuple[Tile, ...]
    local: Local | None
    ctx: Any
    factors_of: Callable[[JaxprEqn], Factors]
    layers_of: Callable[[JaxprEqn], Sequence[Layer]] | None = None

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
        ends = {"invars": self.eqn.outvars, "outvars": self.eqn.invars}
        eqn = self.eqn.replace(**ends, params=params)
        return replace(self, result=source, eqn=eqn, operands=(result,))

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

    @functools.cached_property
    def dims(self) -> list[list[int | None]]:
        """For every dim of every operand, the dim of the result that has the same rows, or None."""
        factors = self.factors_of(self.eqn)
        (result,), resized = factors.results, factors.resized
        at = {dim: d for d, dim in enumerate(result) if dim and resized.isdisjoint(dim)}
        return [[at.get(dim) for dim in operand] for operand in factors.operands]

    def is_made_by_parts_of(self, dims: Iterable[int]) -> bool:
        """Whether parts of the result along these dims are made of the same parts of operands."""
        repeats = self.eqn.primitive is p.broadcast_in_dim_p
        return repeats or all(any(d in operand for operand in self.dims) for d in dims)

    def operands_under(self, target: Sharding) -> list[Sharding] | None:
        """The shardings of the operands for which the result has `target`."""
        if self.local is None:
            return None
        if target.is_replicated:  # any operator on replicated values
            return [Sharding.replicated(t.sharding.rank, target.num_devices) for t in self.operands]
        split = [d for d, s in enumerate(target.splits) if s]
        if target.manual or not self.is_made_by_parts_of(split):
            return None
        return [target.project(named) for named in self.dims]

    def run(self, arrays: Sequence[jax.Array], local: Sequence[int]) -> jax.Array:
        """The operator on local arrays, with a result of the shape `local`."""
        devices = self.result.sharding.num_devices
        tiles = [Tile(a, Sharding.replicated(a.ndim, devices), a.shape) for a in arrays]
        assert self.local
        (result,) = self.local(self.ctx, self.eqn, tiles, [tuple(local)])
        return result
