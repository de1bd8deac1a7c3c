"""The five communication primitives (section 3.3.1) over arbitrary groups of devices, as nodes.

Groups are lists of device ids of one size, in the order in which members take part. They need not
cover all devices: the others are in additional groups whose results are unused, because XLA needs
every device in a group of the same size.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.graph.caching import cached
from gshard.graph.reason import Reason
from gshard.graph.source import because
from gshard.moving.costs import sent_bytes
from gshard.moving.nodes import Node, communicate
from gshard.tensors.devices import Groups, Place
from gshard.tensors.keys import as_integers, is_key
from gshard.tensors.tile import byte_size

Members = Sequence[Sequence[int]]


@dataclass(frozen=True)
class CollectiveNode(Node):
    """A node that is one collective: one call of `lax`. Named as in XLA's programs.

    `groups` has every device once; of a permute, they are its (source, destination) pairs.
    """

    needs_device: ClassVar[bool] = False
    groups: Groups

    def result(self, local: tuple[int, ...]) -> tuple[int, ...]:
        """As large as the operand."""
        return local

    @property
    def members(self) -> int:
        """How many devices the largest group has."""
        return max(map(len, self.groups), default=1)

    def sent(self, local: tuple[int, ...], dtype: Any) -> int:
        """What a member of the largest group sends."""
        return sent_bytes(self.name.replace("-", "_"), byte_size(local, dtype), self.members)

    def listed(self) -> list[list[int]] | None:
        """The groups as JAX takes them: None for all devices in their order."""
        everyone = self.groups == (tuple(range(len(self.groups[0]))),)
        return None if everyone else [list(g) for g in self.groups]

    def run(self, place: Place, array: jax.Array) -> jax.Array:
        """The collective itself."""
        with because(self.reason):
            return self._call(array, place.axes)

    @abc.abstractmethod
    def _call(self, array: jax.Array, axes: tuple[str, ...]) -> jax.Array: ...

    def __str__(self) -> str:
        return f"over {self.members}"


@dataclass(frozen=True)
class AllReduce(CollectiveNode):
    """The members' values combined by `kind`: sum, max or min."""

    name: ClassVar[str] = "all-reduce"
    kind: str

    def _call(self, array: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        reduce = {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}[self.kind]
        return reduce(array, axes, axis_index_groups=self.listed())

    def __str__(self) -> str:
        return f"{self.kind} {super().__str__()}"


@dataclass(frozen=True)
class _AlongDim(CollectiveNode):
    dim: int

    def result(self, local: tuple[int, ...]) -> tuple[int, ...]:
        """All members' rows, or one member's."""
        rows = self._rows(local[self.dim], len(self.groups[0]))
        return (*local[: self.dim], rows, *local[self.dim + 1 :])

    @abc.abstractmethod
    def _rows(self, rows: int, members: int) -> int: ...

    def __str__(self) -> str:
        return f"dim {self.dim} {super().__str__()}"


@dataclass(frozen=True)
class AllGather(_AlongDim):
    """The members' tiles, concatenated along `dim` in the group's order."""

    name: ClassVar[str] = "all-gather"

    def _rows(self, rows: int, members: int) -> int:
        return rows * members

    def _call(self, array: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        along = {"axis": self.dim, "tiled": True, "axis_index_groups": self.listed()}
        return lax.all_gather(array, axes, **along)


@dataclass(frozen=True)
class ReduceScatter(_AlongDim):
    """The sum over the members, of which member j keeps the j-th part of `dim`."""

    name: ClassVar[str] = "reduce-scatter"

    def _rows(self, rows: int, members: int) -> int:
        return rows // members

    def _call(self, array: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        along = {"scatter_dimension": self.dim, "tiled": True, "axis_index_groups": self.listed()}
        return lax.psum_scatter(array, axes, **along)


@dataclass(frozen=True)
class AllToAll(CollectiveNode):
    """Piece j of the leading dim for member j; received pieces are in member order."""

    name: ClassVar[str] = "all-to-all"

    def _call(self, array: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        # XLA makes an operand of every piece, and refuses operands whose layouts differ, be it in
        # the place of a dim of size 1, which has no meaning: a piece has no such dim.
        piece = [n for n in (array.shape[0] // self.members, *array.shape[1:]) if n != 1] or [1]
        rows = array.reshape(self.members * piece[0], *piece[1:])
        sent = lax.all_to_all(rows, axes, 0, 0, tiled=True, axis_index_groups=self.listed())
        return sent.reshape(array.shape)


@dataclass(frozen=True)
class CollectivePermute(CollectiveNode):
    """Sent along (source, destination) pairs; zeros where nothing arrives."""

    name: ClassVar[str] = "collective-permute"

    def listed(self) -> list[list[int]]:
        """The pairs."""
        return [list(pair) for pair in self.groups]

    def _call(self, array: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        return lax.ppermute(array, axes, self.groups)

    def __str__(self) -> str:
        return f"among {len({d for pair in self.groups for d in pair})}"


def all_reduce(place: Place, x: jax.Array, groups: Members, kind: str, reason: Reason) -> jax.Array:
    """Combine the group's values by `kind`: sum, max or min. Every member gets the result."""
    node = AllReduce(reason, _covering(place, groups, even=False), kind)
    if x.dtype == jnp.bool_:
        return communicate(node, x.astype(jnp.int32), place)  # as `lax.psum` does
    raw, back = _sendable(x)
    return back(communicate(node, raw, place))


def all_gather(place: Place, x: jax.Array, dim: int, groups: Members, reason: Reason) -> jax.Array:
    """The members' tiles, concatenated along `dim` in the group's order."""
    if not _covers_evenly(place, groups):
        return _gather_by_sum(place, x, dim, groups, reason)
    raw, back = _sendable(x)
    return back(communicate(AllGather(reason, _covering(place, groups), dim), raw, place))


def all_to_all(place: Place, x: jax.Array, groups: Members, reason: Reason) -> jax.Array:
    """Send piece j of the leading dim to member j; received pieces are in member order."""
    if not _covers_evenly(place, groups):
        everything = _gather_by_sum(place, x[None], 0, groups, reason)
        mine = place.lookup(_rank_in_group(place, groups))
        return lax.dynamic_index_in_dim(everything, mine, axis=1, keepdims=False)
    raw, back = _sendable(x)
    return back(communicate(AllToAll(reason, _covering(place, groups)), raw, place))


def reduce_scatter(
    place: Place, x: jax.Array, dim: int, groups: Members, reason: Reason
) -> jax.Array:
    """The sum over the group; member j keeps the j-th part of `dim`."""
    if not _covers_evenly(place, groups):
        size = x.shape[dim] // len(groups[0])
        whole = all_reduce(place, x, groups, "sum", reason)
        start = place.lookup(_rank_in_group(place, groups) * size)
        return lax.dynamic_slice_in_dim(whole, start, size, dim)
    node = ReduceScatter(reason, _covering(place, groups), dim)
    raw, back = _sendable(x)
    return back(communicate(node, raw, place))


def _sendable(x: jax.Array) -> tuple[jax.Array, Callable[[Any], jax.Array]]:
    """What XLA can send for `x`, and the inverse function: keys as integers, 2 bits as bytes.

    For integers of less than 4 bits, XLA's collectives on CPUs write beyond their buffers.
    """
    if jnp.issubdtype(x.dtype, jnp.integer) and jnp.iinfo(x.dtype).bits < 4:
        return x.astype(jnp.int8), lambda raw: raw.astype(x.dtype)
    return as_integers(x)


def collective_permute(
    place: Place, x: jax.Array, pairs: Sequence[tuple[int, int]], reason: Reason
) -> jax.Array:
    """Send along the (source, destination) pairs; zeros where nothing arrives."""
    raw, back = _sendable(x)
    if place.blocks > 1:
        return back(_permuted_in_block(place, raw, pairs, reason))
    return back(communicate(CollectivePermute(reason, tuple(pairs)), raw, place))


def _permuted_in_block(
    place: Place, x: jax.Array, pairs: Sequence[tuple[int, int]], reason: Reason
) -> jax.Array:
    """The same by AllToAlls between two devices each, in two rounds, or three for an odd ring.

    XLA's permute waits for the devices of all blocks, but blocks may run another number of times:
    stages do in a tick. A group of an AllToAll waits for its own members alone.
    """
    is_own = np.isin(np.arange(place.num_devices), [a for a, b in pairs if a == b])
    found = place.where(is_own, x) if is_own.any() else jnp.zeros_like(x)
    for part in _matched(tuple(pairs)):
        groups = tuple(dict.fromkeys((min(pair), max(pair)) for pair in part))
        rank = _rank_in_group(place, groups)
        to, source = np.full((2, place.num_devices), -1)
        for sender, receiver in part:
            to[sender], source[receiver] = rank[receiver], rank[sender]
        rows = lax.broadcasted_iota(np.int32, (2, *x.shape), 0)
        sent = jnp.where(rows == place.lookup(to), x, jnp.zeros_like(x))
        received, number = all_to_all(place, sent, groups, reason), place.lookup(source)
        piece = lax.dynamic_index_in_dim(received, jnp.maximum(number, 0), 0, keepdims=False)
        found = jnp.where(number >= 0, piece, found)
    return found


@cached
def _matched(pairs: Groups) -> tuple[Groups, ...]:
    """Pairs in rounds, in each of which a device has one partner at most."""
    rounds: list[list[tuple[int, ...]]] = []
    for pair in sorted(pair for pair in pairs if pair[0] != pair[1]):
        busy = ({d for each in now for d in each if each != pair[::-1]} for now in rounds)
        free = (n for n, devices in enumerate(busy) if not devices.intersection(pair))
        number = next(free, len(rounds))
        rounds += [[]] * (number == len(rounds))
        rounds[number] = [*rounds[number], pair]
    return tuple(map(tuple, rounds))


def _covers_evenly(place: Place, groups: Members) -> bool:
    return _leaves_groups(len(groups[0]), len(groups), place.num_devices)


def _leaves_groups(members: int, groups: int, num_devices: int) -> bool:
    """Whether the devices outside of so many groups can be in groups of this size, too."""
    return (num_devices - members * groups) % members == 0


def sent_in_groups(kind: str, size: int, members: int, groups: int, num_devices: int) -> int:
    """What `all_gather` or `all_to_all` sends, of `size` bytes of each member of so many groups."""
    if _leaves_groups(members, groups, num_devices):
        return sent_bytes(kind, size, members)
    return sent_bytes("all_reduce", size * members, members)


def _covering(place: Place, groups: Members, even: bool = True) -> Groups:
    """The groups, and groups of the devices that are in none of them."""
    return place.in_all_blocks(_with_idle(tuple(map(tuple, groups)), place.num_devices, even))


@cached
def _with_idle(groups: Groups, num_devices: int, even: bool) -> Groups:
    members = {d for g in groups for d in g}
    idle = tuple(d for d in range(num_devices) if d not in members)
    size = len(groups[0]) if even else 1
    return groups + tuple(idle[i : i + size] for i in range(0, len(idle), size))


def _rank_in_group(place: Place, groups: Members) -> np.ndarray:
    rank = np.zeros(place.num_devices, np.int32)
    for group in groups:
        rank[list(group)] = np.arange(len(group))
    return rank


def _gather_by_sum(
    place: Place, x: jax.Array, dim: int, groups: Members, reason: Reason
) -> jax.Array:
    """An all-gather for groups that omit an odd number of devices: a sum of disjoint parts.

    Sums allow groups of any size. The parts are sent as integers, so that no bit changes.
    """
    bits, back = as_bits(x)
    shape = list(bits.shape)
    shape[dim] *= len(groups[0])
    start = place.lookup(_rank_in_group(place, groups) * x.shape[dim])
    mine = lax.dynamic_update_slice_in_dim(jnp.zeros(shape, bits.dtype), bits, start, dim)
    return back(all_reduce(place, mine, groups, "sum", reason))


def merge_disjoint(place: Place, x: jax.Array, groups: Members, reason: Reason) -> jax.Array:
    """The members' disjoint parts of one array, merged by a sum; the others have zeros there."""
    bits, back = as_bits(x)
    return back(all_reduce(place, bits, groups, "sum", reason))


def scatter_disjoint(
    place: Place, x: jax.Array, dim: int, groups: Members, reason: Reason
) -> jax.Array:
    """`merge_disjoint`, scattered: member j keeps the j-th part of `dim`."""
    bits, back = as_bits(x)
    return back(reduce_scatter(place, bits, dim, groups, reason))


def as_bits(x: jax.Array) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """`x` as integers, whose sum with zeros changes no bit, and the inverse function."""
    if is_key(x):
        return as_integers(x)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8), lambda bits: bits.astype(jnp.bool_)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        parts, unbits = as_bits(jnp.stack([x.real, x.imag], axis=-1))

        def joined(bits: jax.Array) -> jax.Array:
            pair = unbits(bits)
            return lax.complex(pair[..., 0], pair[..., 1])

        return parts, joined
    if jnp.issubdtype(x.dtype, jnp.floating):
        if jnp.finfo(x.dtype).bits < 8:  # of 4 bits: XLA does not make integers of them everywhere
            wider, unbits = as_bits(x.astype(jnp.float8_e4m3fn))
            return wider, lambda bits: unbits(bits).astype(x.dtype)
        integer = jnp.dtype(f"uint{jnp.finfo(x.dtype).bits}")
        return lax.bitcast_convert_type(x, integer), lambda bits: lax.bitcast_convert_type(
            bits, x.dtype
        )
    return x, lambda bits: bits
