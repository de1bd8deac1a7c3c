"""Rows that lie by groups: every device holds the rows of its own experts, however many there are.

`ragged_dot` multiplies rows, sorted by group, with a matrix per group. Where the groups are split
over devices, `dropless` lets the rows between two exchanges lie like the groups. Such a tensor is
an ordinary one of `parts.tiles * room` rows, split evenly: tile c holds the rows of its groups,
one after the other, and garbage behind them. How many there are is known at run time only.

A device whose groups have more rows than there is `room` for would have to drop some. Instead, all
of them then hold equal shares of the sorted rows, and the matrices travel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive

from gshard.tensors.sharding import Split

ROOM = 2  # times its share of the rows that a device has room for


@dataclass(frozen=True)
class Groups:
    """`rows` sorted rows in `count` groups, which are cut by `split`; the rows by `parts`.

    `parts` cuts what a tile of `split` has into equal parts, for the devices with copies of it.
    """

    split: Split
    parts: Split
    rows: int
    count: int

    @property
    def share(self) -> int:
        """Rows of a device if all have the same."""
        return -(-self.rows // self.parts.tiles)

    @property
    def room(self) -> int:
        """Rows that a device can hold."""
        return min(self.rows, ROOM * self.share)

    @property
    def held(self) -> int:
        """Rows of a tensor that lies by groups: those of all devices, garbage included."""
        return self.parts.tiles * self.room

    @property
    def per_tile(self) -> int:
        """Groups of a tile, the last of which may have fewer."""
        return -(-self.count // self.split.tiles)


@dataclass(frozen=True)
class Bounds:
    """Where groups and devices begin and end in the sorted rows, at run time.

    `first[g]` is the first row of group g, and `first[count]` the end of the last; device-tile c
    holds rows `starts[c]` to `starts[c + 1]`. `crowded` says that the rows are in equal shares.
    """

    first: jax.Array
    starts: jax.Array
    crowded: jax.Array


def bounds(groups: Groups, sizes: jax.Array) -> Bounds:
    """The bounds that the sizes of the groups amount to."""
    rows, tiles = groups.rows, groups.split.tiles
    copies = groups.parts.tiles // tiles
    total = jnp.cumsum(sizes.astype(jnp.int32))
    first = jnp.minimum(jnp.concatenate([jnp.zeros(1, jnp.int32), total]), rows)
    borders = first[jnp.minimum(jnp.arange(tiles) * groups.per_tile, groups.count)]
    ends = jnp.append(borders[1:], rows)  # rows of no group lie with the last
    part = -(-(ends - borders) // copies)
    starts = jnp.minimum(borders[:, None] + part[:, None] * jnp.arange(copies), ends[:, None])
    starts = jnp.append(starts.reshape(-1), rows)
    equal = jnp.minimum(jnp.arange(groups.parts.tiles + 1, dtype=jnp.int32) * groups.share, rows)
    crowded = jnp.max(jnp.diff(starts)) > groups.room
    return Bounds(first, jnp.where(crowded, equal, starts), crowded)


# Rows of a tensor, taken by index: `source` and `target` say whether the tensor and the result lie
# by groups (`Groups`) or as usual (None). Operands: the tensor, the groups' sizes, and the indices;
# without them, row i of the result is row i of the tensor.
take_rows_p = Primitive("take_rows")

# A tensor that rows are put into by index, or added to: `source` is how the rows lie, and `target`
# how the tensor does. Operands: the tensor, the groups' sizes, the rows, and the indices.
put_rows_p = Primitive("put_rows")

# `ragged_dot_general` of rows that lie by groups: as `numbers` and the like say.
grouped_dot_p = Primitive("grouped_dot")


def rows_of(groups: Groups | None, usual: int) -> int:
    """The number of rows of a tensor that lies by groups, or as usual."""
    return groups.held if groups else usual


@take_rows_p.def_abstract_eval
def _take_rows(x: Any, sizes: Any, *indices: Any, source: Any, target: Any, **_: Any) -> Any:
    usual = indices[0].shape[0] if indices else (source or target).rows
    return ShapedArray((rows_of(target, usual), *x.shape[1:]), x.dtype)


@put_rows_p.def_abstract_eval
def _put_rows(x: Any, sizes: Any, rows: Any, indices: Any, **_: Any) -> Any:
    return ShapedArray(x.shape, x.dtype)


@grouped_dot_p.def_abstract_eval
def _grouped_dot(lhs: Any, rhs: Any, sizes: Any, groups: Groups, **params: Any) -> Any:
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (lhs, rhs, sizes)]
    made = jax.eval_shape(lambda *operands: lax.ragged_dot_general(*operands, **params), *structs)
    return ShapedArray(made.shape, made.dtype)
