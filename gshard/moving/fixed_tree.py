"""Subtrees of a sum, of which every device has one, added in the order of a fixed tree.

A sum of floats by AllReduce has the order that the devices happen to have. Here what is sent is
sent as it is, and each device adds a part of all subtrees by itself: as many bytes, and one order.
"""

from __future__ import annotations

import math

import jax
from jax import lax

from gshard.graph.reason import Reason
from gshard.moving import collectives
from gshard.tensors.devices import Groups, Place
from gshard.tensors.trees import neighbours


def tree_all_reduce(place: Place, x: jax.Array, groups: Groups, reason: Reason) -> jax.Array:
    """The sum of the group's values, on every member."""
    members, size = len(groups[0]), math.prod(x.shape)
    flat = lax.reshape(x, (size,))
    padded = lax.pad(flat, lax.full_like(flat, 0, shape=()), ((0, -size % members, 0),))
    parts = lax.reshape(padded, (members, padded.shape[0] // members))
    mine = neighbours(collectives.all_to_all(place, parts, groups, reason), 0, lax.add)
    whole = collectives.all_gather(place, mine, 0, groups, reason)
    return lax.reshape(lax.slice_in_dim(whole, 0, size), x.shape)


def tree_reduce_scatter(
    place: Place, x: jax.Array, dim: int, groups: Groups, reason: Reason
) -> jax.Array:
    """The sum of the group's values, of which member j keeps the j-th part of `dim`."""
    members = len(groups[0])
    rows = x.shape[dim] // members
    parts = lax.reshape(x, (*x.shape[:dim], members, rows, *x.shape[dim + 1 :]))
    first = (dim, *(d for d in range(parts.ndim) if d != dim))
    received = collectives.all_to_all(place, lax.transpose(parts, first), groups, reason)
    return neighbours(received, 0, lax.add)
