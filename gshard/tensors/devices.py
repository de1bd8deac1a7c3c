"""The devices of a partitioned program, and this device among them.

One program runs on all devices. What differs per device is data: a row of a small table, looked up
by the device's own number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive

from gshard._jax import mlir
from gshard.graph.caching import cached
from gshard.tensors import padding
from gshard.tensors.sharding import Split

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Table:
    """Integers, a row for each device."""

    raw: bytes
    shape: tuple[int, ...]

    @staticmethod
    def of(rows: np.ndarray) -> Table:
        """A table of 32-bit integers."""
        return Table(np.ascontiguousarray(rows, np.int32).tobytes(), rows.shape)

    @property
    def rows(self) -> np.ndarray:
        """The integers."""
        return np.frombuffer(self.raw, np.int32).reshape(self.shape)

    def __str__(self) -> str:
        return str(self.rows.tolist()).replace(" ", "")


@cached
def _numbers(count: int) -> Table:
    """The number of each device."""
    return Table.of(np.arange(count))


lookup_p = Primitive("lookup")  # a device's row of a `table`


@lookup_p.def_abstract_eval
def _lookup_aval(device: Any, *, table: Table) -> ShapedArray:
    return ShapedArray(table.shape[1:], np.dtype(np.int32))


def _lookup(device: jax.Array, *, table: Table) -> jax.Array:
    starts = [device, *(jnp.zeros_like(device) for _ in table.shape[1:])]
    row = lax.dynamic_slice(jnp.asarray(table.rows), starts, (1, *table.shape[1:]))
    return row.reshape(table.shape[1:])


mlir.register_lowering(lookup_p, mlir.lower_fun(_lookup, multiple_results=False))


@dataclass(frozen=True)
class Place:
    """The devices of a program, and this device among them: what differs per device is data.

    Where the devices are in `blocks`, as the stages of a pipeline are, `num_devices` is the size of
    a block, and the same program runs in each, on values of its own.
    """

    axes: tuple[str, ...]
    num_devices: int
    planned: bool = True  # False: collectives are called at once, and are not nodes of a plan
    blocks: int = 1
    opaque: jax.Array | None = None  # 32 bits that are all set, which the compiler cannot know
    rows: dict[Table, jax.Array] = field(default_factory=dict, compare=False)  # looked up so far
    masks: dict[bytes, Any] = field(default_factory=dict, compare=False)  # by `where`
    zeros: dict[Any, jax.Array] = field(default_factory=dict, compare=False)  # of a shape and type

    bounds: dict[Any, Any] = field(default_factory=dict, compare=False)  # of `rules.grouped`

    def inner(self) -> Place:
        """The same devices for the body of a loop or branch, which may not leak values out."""
        rows, bounds = dict(self.rows), dict(self.bounds)
        return replace(
            self, rows=rows, masks=dict(self.masks), zeros=dict(self.zeros), bounds=bounds
        )

    def numbered(self, number: Any) -> Place:
        """The same devices, of which this one has the number given."""
        return replace(self, rows={_numbers(self.num_devices): number})

    def device_id(self) -> jax.Array:
        """The id of this device, at run time."""
        key = _numbers(self.num_devices)
        if key not in self.rows:
            number = lax.axis_index(self.axes)
            self.rows[key] = number % self.num_devices if self.blocks > 1 else number
        return self.rows[key]

    def in_all_blocks(self, groups: Sequence[tuple[int, ...]]) -> Groups:
        """Groups of devices, or pairs of them, of every block."""
        if self.blocks == 1:
            return tuple(groups)
        firsts = range(0, self.blocks * self.num_devices, self.num_devices)
        return tuple(tuple(first + d for d in group) for first in firsts for group in groups)

    def lookup(self, table: np.ndarray) -> jax.Array | int:
        """Row `device_id` of a table with a row per device; a plain int if all rows are equal."""
        table = np.asarray(table, np.int32)
        if (table == table[:1]).all():
            return int(table[0]) if table.ndim == 1 else jnp.asarray(table[0])
        key, number = Table.of(table), self.device_id()
        if key not in self.rows:
            self.rows[key] = lookup_p.bind(number, table=key)
        return self.rows[key]

    def where(self, devices: np.ndarray, x: jax.Array, other: jax.Array | None = None) -> jax.Array:
        """`x` on the devices that `devices` is true for, `other` (or zeros) on all others."""
        own, nothing = devices.tobytes(), (x.shape, x.dtype)
        if own not in self.masks:
            self.masks[own] = self.lookup(devices.astype(np.int32)) == 1
        if other is None and nothing not in self.zeros:
            self.zeros[nothing] = padding.blank(x.shape, x.dtype)
        return lax.select_n(self.masks[own], self.zeros[nothing] if other is None else other, x)

    def start(self, table: np.ndarray) -> jax.Array:
        """A row of one number as a slice's start: of 32 bits, as all starts need one dtype."""
        return jnp.asarray(self.lookup(table), jnp.int32)

    def coord(self, split: Split) -> jax.Array | int:
        """Which tile of `split` this device holds (0 on a device that holds none)."""
        return self.lookup(split.own)

    def of_tile(self, split: Split, table: np.ndarray) -> jax.Array | int:
        """The row of the tile that this device holds, of a table with a row per tile."""
        return self.lookup(table[split.own])


def groups_by(key: np.ndarray, order: np.ndarray) -> Groups:
    """Devices with equal `key` (negative: left out), each group sorted by `order`."""
    return _groups_by(*(np.ascontiguousarray(x, np.int64).tobytes() for x in (key, order)))


@cached  # repeated layers ask for the same groups of thousands of devices
def _groups_by(raw_key: bytes, raw_order: bytes) -> Groups:
    key, order = (np.frombuffer(raw, np.int64) for raw in (raw_key, raw_order))
    devices = np.lexsort((order, key))
    devices = devices[key[devices] >= 0]
    borders = np.flatnonzero(np.diff(key[devices])) + 1
    return tuple(tuple(group.tolist()) for group in np.split(devices, borders))
