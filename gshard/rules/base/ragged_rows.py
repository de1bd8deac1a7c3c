"""Expert-major rows: every device holds the rows of its own experts, however many there are.

`ragged_dot` multiplies rows, sorted by group, with a matrix per group. If the groups are split over
devices, `propagation.rewrites.exchange_by_expert` keeps the rows between two exchanges sharded like
the groups: their split is ragged (`tensors.sharding.Ragged`). Tile c has the rows of its groups in
order, then garbage. How many rows that are is only known at run time.

If the groups of a device have more rows than its `capacity`, no row is dropped: all devices
then hold equal shares of the sorted rows, and the matrices pass around a ring instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive

from gshard.tensors.sharding import Ragged, Split

CAPACITY = 2  # capacity of a device, in multiples of its share of the rows


@dataclass(frozen=True)
class ExpertGroups:
    """`rows` sorted rows in `count` groups, which are split by `split`; the rows by `parts`.

    `parts` divides a tile of `split` into equal parts, among the devices with copies of it.
    `number` tells the lists of sizes of a program apart.
    """

    split: Split
    parts: Split
    rows: int
    count: int
    number: int

    def __str__(self) -> str:
        return f"{self.rows} rows in {self.count} groups over {self.parts.tiles} devices"

    @property
    def ragged(self) -> Split:
        """The split of expert-major rows."""
        return self.parts.ragged_by(Ragged(self.number, self.capacity))

    @property
    def share(self) -> int:
        """Rows per device if balanced."""
        return -(-self.rows // self.parts.tiles)

    @property
    def capacity(self) -> int:
        """The capacity of a device, in rows."""
        return min(self.rows, CAPACITY * self.share)

    @property
    def per_tile(self) -> int:
        """Groups per tile; the last tile may have fewer."""
        return -(-self.count // self.split.tiles)


@dataclass(frozen=True)
class Bounds:
    """Where groups and devices begin and end in the sorted rows, at run time.

    `first[g]` is the first row of group g, and `first[count]` the end of the last; device-tile c
    holds rows `starts[c]` to `starts[c + 1]`. `overflow` is true on overflow, when the rows are in
    equal shares.
    """

    first: jax.Array
    starts: jax.Array
    overflow: jax.Array


def bounds(groups: ExpertGroups, sizes: jax.Array) -> Bounds:
    """The bounds for these sizes of the groups."""
    rows, tiles = groups.rows, groups.split.tiles
    copies = groups.parts.tiles // tiles
    total = jnp.cumsum(sizes.astype(jnp.int32))
    first = jnp.minimum(jnp.concatenate([jnp.zeros(1, jnp.int32), total]), rows)
    borders = first[jnp.minimum(jnp.arange(tiles) * groups.per_tile, groups.count)]
    ends = jnp.append(borders[1:], rows)  # rows of no group are with those of the last
    part = -(-(ends - borders) // copies)
    starts = jnp.minimum(borders[:, None] + part[:, None] * jnp.arange(copies), ends[:, None])
    starts = jnp.append(starts.reshape(-1), rows)
    equal = jnp.minimum(jnp.arange(groups.parts.tiles + 1, dtype=jnp.int32) * groups.share, rows)
    overflow = jnp.max(jnp.diff(starts)) > groups.capacity
    return Bounds(first, jnp.where(overflow, equal, starts), overflow)


# Rows of a tensor, taken by index: `source` and `target` say whether the tensor and the result are
# expert-major (`ExpertGroups`) or token-major (None). Operands: the tensor, the groups' sizes, and
# the indices; without them, row i of the result is row i of the tensor.
take_rows_p = Primitive("take_rows")

# A tensor into which rows are written or added by index: `source` is the order of the rows,
# `target` that of the tensor. Operands: the tensor, the groups' sizes, the rows, and the indices.
put_rows_p = Primitive("put_rows")

# `ragged_dot_general` of expert-major rows.
grouped_dot_p = Primitive("grouped_dot")


@take_rows_p.def_abstract_eval
def _take_rows(x: Any, sizes: Any, *indices: Any, **_: Any) -> Any:
    return ShapedArray(((indices[0] if indices else x).shape[0], *x.shape[1:]), x.dtype)


@put_rows_p.def_abstract_eval
def _put_rows(x: Any, sizes: Any, rows: Any, indices: Any, **_: Any) -> Any:
    return ShapedArray(x.shape, x.dtype)


@grouped_dot_p.def_abstract_eval
def _grouped_dot(lhs: Any, rhs: Any, sizes: Any, groups: ExpertGroups, **params: Any) -> Any:
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (lhs, rhs, sizes)]
    made = jax.eval_shape(lambda *operands: lax.ragged_dot_general(*operands, **params), *structs)
    return ShapedArray(made.shape, made.dtype)
