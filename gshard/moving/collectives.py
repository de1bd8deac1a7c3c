"""The five communication primitives (section 3.3.1) over arbitrary groups of devices.

Groups are lists of device ids of one size, in the order in which members take part. They need not
cover all devices: the others are in additional groups whose results are unused, because XLA needs
every device in a group of the same size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.graph.reason import Reason
from gshard.graph.source import because
from gshard.tensors.devices import Place
from gshard.tensors.keys import as_integers, is_key

Groups = Sequence[Sequence[int]]


def all_reduce(place: Place, x: jax.Array, groups: Groups, kind: str, reason: Reason) -> jax.Array:
    """Combine the group's values by `kind`: sum, max or min. Every member gets the result."""
    reduce = {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}[kind]
    with because(reason):
        return reduce(x, place.axes, axis_index_groups=_index_groups(place, groups, even=False))


def all_gather(place: Place, x: jax.Array, dim: int, groups: Groups, reason: Reason) -> jax.Array:
    """The members' tiles, concatenated along `dim` in the group's order."""
    with because(reason):
        if not _covers_evenly(place, groups):
            return _gather_by_sum(place, x, dim, groups)
        listed = _index_groups(place, groups)
        raw, back = as_integers(x)
        return back(lax.all_gather(raw, place.axes, axis=dim, tiled=True, axis_index_groups=listed))


def all_to_all(place: Place, x: jax.Array, groups: Groups, reason: Reason) -> jax.Array:
    """Send piece j of the leading dim to member j; received pieces are in member order."""
    with because(reason):
        if not _covers_evenly(place, groups):
            everything = _gather_by_sum(place, x[None], 0, groups)
            mine = place.lookup(_rank_in_group(place, groups))
            return lax.dynamic_index_in_dim(everything, mine, axis=1, keepdims=False)
        listed = _index_groups(place, groups)
        raw, back = as_integers(x)
        return back(lax.all_to_all(raw, place.axes, 0, 0, tiled=True, axis_index_groups=listed))


def reduce_scatter(
    place: Place, x: jax.Array, dim: int, groups: Groups, reason: Reason
) -> jax.Array:
    """The sum over the group; member j keeps the j-th part of `dim`."""
    with because(reason):
        if not _covers_evenly(place, groups):
            size = x.shape[dim] // len(groups[0])
            whole = lax.psum(
                x, place.axes, axis_index_groups=_index_groups(place, groups, even=False)
            )
            start = place.lookup(_rank_in_group(place, groups) * size)
            return lax.dynamic_slice_in_dim(whole, start, size, dim)
        return lax.psum_scatter(
            x,
            place.axes,
            scatter_dimension=dim,
            tiled=True,
            axis_index_groups=_index_groups(place, groups),
        )


def collective_permute(
    place: Place, x: jax.Array, pairs: Sequence[tuple[int, int]], reason: Reason
) -> jax.Array:
    """Send along the (source, destination) pairs; zeros where nothing arrives."""
    with because(reason):
        raw, back = as_integers(x)
        return back(lax.ppermute(raw, place.axes, list(pairs)))


def _covers_evenly(place: Place, groups: Groups) -> bool:
    idle = place.num_devices - sum(map(len, groups))
    return idle % len(groups[0]) == 0


def _index_groups(place: Place, groups: Groups, even: bool = True) -> list[list[int]] | None:
    """Groups for JAX, which must cover all devices; None for a single group in device order."""
    return _with_idle(tuple(map(tuple, groups)), place.num_devices, even)


@functools.lru_cache(maxsize=256)
def _with_idle(
    groups: tuple[tuple[int, ...], ...], num_devices: int, even: bool
) -> list[list[int]] | None:
    listed = [list(g) for g in groups]
    if listed == [list(range(num_devices))]:
        return None
    members = {d for g in listed for d in g}
    idle = [d for d in range(num_devices) if d not in members]
    size = len(listed[0]) if even else 1
    return listed + [idle[i : i + size] for i in range(0, len(idle), size)]


def _rank_in_group(place: Place, groups: Groups) -> np.ndarray:
    rank = np.zeros(place.num_devices, np.int32)
    for group in groups:
        rank[list(group)] = np.arange(len(group))
    return rank


def _gather_by_sum(place: Place, x: jax.Array, dim: int, groups: Groups) -> jax.Array:
    """An all-gather for groups that omit an odd number of devices: a sum of disjoint parts.

    Sums allow groups of any size. The parts are sent as integers, so that no bit changes.
    """
    bits, back = _as_bits(x)
    shape = list(bits.shape)
    shape[dim] *= len(groups[0])
    start = place.lookup(_rank_in_group(place, groups) * x.shape[dim])
    mine = lax.dynamic_update_slice_in_dim(jnp.zeros(shape, bits.dtype), bits, start, dim)
    whole = lax.psum(mine, place.axes, axis_index_groups=_index_groups(place, groups, even=False))
    return back(whole)


def merge_disjoint(place: Place, x: jax.Array, groups: Groups, reason: Reason) -> jax.Array:
    """The members' disjoint parts of one array, merged by a sum; the others have zeros there."""
    bits, back = _as_bits(x)
    return back(all_reduce(place, bits, groups, "sum", reason))


def scatter_disjoint(
    place: Place, x: jax.Array, dim: int, groups: Groups, reason: Reason
) -> jax.Array:
    """`merge_disjoint`, scattered: member j keeps the j-th part of `dim`."""
    bits, back = _as_bits(x)
    return back(reduce_scatter(place, bits, dim, groups, reason))


def _as_bits(x: jax.Array) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """`x` as integers, whose sum with zeros changes no bit, and the inverse function."""
    if is_key(x):
        return as_integers(x)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8), lambda bits: bits.astype(jnp.bool_)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        parts, unbits = _as_bits(jnp.stack([x.real, x.imag], axis=-1))

        def joined(bits: jax.Array) -> jax.Array:
            pair = unbits(bits)
            return lax.complex(pair[..., 0], pair[..., 1])

        return parts, joined
    if jnp.issubdtype(x.dtype, jnp.floating):
        integer = jnp.dtype(f"uint{x.dtype.itemsize * 8}")
        return lax.bitcast_convert_type(x, integer), lambda bits: lax.bitcast_convert_type(
            bits, x.dtype
        )
    return x, lambda bits: bits
