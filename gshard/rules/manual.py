"""The borders of manual regions (section 3.2), and what may happen inside.

Inside, every device has its own value, and operators run unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Primitive
from jax.extend.core import primitives as p

from gshard.graph.reason import Reason
from gshard.graph.source import because, source_of
from gshard.moving import collectives
from gshard.rules.base.rule import Context, Doc, RegionRule, bind_local, region
from gshard.tensors.devices import Groups, Place
from gshard.tensors.manual import (
    collective_p,
    over_groups_p,
    partition_id_p,
    row_of_device_p,
    to_auto_p,
    to_manual_p,
)
from gshard.tensors.sharding import Sharding, Targets
from gshard.tensors.tile import Arrays, Tile, Tiles

# Control flow partitions its bodies, in which manual and automatic values may both occur.
CROSSING_MANUAL = (to_auto_p, collective_p, over_groups_p, p.scan_p, p.while_p, p.cond_p)


def _run_manually(ctx: Context, eqn: JaxprEqn, tiles: Tiles, targets: Targets) -> Tiles:
    """An operator inside of a manual region: the primitive itself, on what each device has."""
    if not all(target.manual for target in targets):
        raise ValueError(
            f"{source_of(eqn)}: {eqn.primitive.name} mixes a value of a manual region with "
            "one that is partitioned automatically; convert it with "
            "manual_to_auto_spmd_partition first"
        )
    return [own(ctx, a) for a in bind_local(ctx, eqn, _in_region(ctx, eqn, tiles), [])]


def _in_region(ctx: Context, eqn: JaxprEqn, tiles: Sequence[Tile]) -> Tiles:
    """Operands inside a manual region; those from outside are replicated."""
    reason = Reason("operand", f"{eqn.primitive.name} in a manual region")
    return [ctx.reshard(t, _manual(ctx, len(t.shape)), reason) for t in tiles]


def _manual(ctx: Context, rank: int) -> Sharding:
    return Sharding((None,) * rank, ctx.place.num_devices, manual=True)


def own(ctx: Context, array: jax.Array) -> Tile:
    """What this device has, as a value of a manual region."""
    return Tile(array, _manual(ctx, array.ndim), array.shape)


@region(to_manual_p, doc=Doc(free="border of a manual region"))
def _to_manual(ctx: Context, eqn: JaxprEqn, tiles: Tiles, targets: Targets) -> Tiles:
    sharding = eqn.params["annotation"].sharding
    array = ctx.reshard(tiles[0], sharding, Reason("step", "", "entering a manual region")).array
    if eqn.params["copies"] == "first" and sharding.replicas > 1:
        array = ctx.place.where(sharding.first_copies, array)
    return [own(ctx, array)]


@region(to_auto_p, doc=Doc(free="border of a manual region"))
def _to_auto(ctx: Context, eqn: JaxprEqn, tiles: Tiles, targets: Targets) -> Tiles:
    sharding = eqn.params["annotation"].sharding
    array = tiles[0].array
    if eqn.params["copies"] == "all" and sharding.replicas > 1:
        reason = Reason("step", "", "gradient of what every copy received in a manual region")
        groups = sharding.copies
        array = collectives.all_reduce(ctx.place, array, groups, "sum", reason)
    return [Tile(array, sharding, tuple(eqn.params["shape"]))]


@region(collective_p, doc=Doc(gather="as the user says"))
def _collective(ctx: Context, eqn: JaxprEqn, tiles: Tiles, targets: Targets) -> Tiles:
    kind, dim, groups = (eqn.params[k] for k in ("kind", "dim", "groups"))
    along = {
        "all_reduce": (groups, "sum"),
        "all_gather": (dim, groups),
        "reduce_scatter": (dim, groups),
    }
    settings = (*along.get(kind, (groups,)), Reason("asked", "a manual region"))
    return [own(ctx, getattr(collectives, kind)(ctx.place, tiles[0].array, *settings))]


@region(over_groups_p, doc=Doc(gather="as jax.shard_map says"))
def _over_groups(ctx: Context, eqn: JaxprEqn, tiles: Tiles, targets: Targets) -> Tiles:
    """A collective of `jax.shard_map`."""
    arrays = [t.array for t in _in_region(ctx, eqn, tiles)]
    with because(Reason("asked", "jax.shard_map")):
        return [own(ctx, a) for a in run_over_groups(ctx.place, arrays, **eqn.params)]


def run_over_groups(
    place: Place, arrays: Arrays, primitive: Primitive, settings: Any, groups: Groups
) -> Arrays:
    """A collective that named axes: the primitive itself, over groups of devices or their pairs."""
    params, groups = dict(settings), place.in_all_blocks(groups)
    if primitive is p.ppermute_p:
        params |= {"axis_name": place.axes, "perm": groups}
    else:
        name = "axes" if primitive in (p.psum_p, p.pmax_p, p.pmin_p) else "axis_name"
        alone = groups == (tuple(range(place.num_devices)),)
        params |= {name: place.axes, "axis_index_groups": None if alone else groups}
    out = primitive.bind(*arrays, **params)
    return out if primitive.multiple_results else [out]


@region(row_of_device_p, doc=Doc(free="the device's own number"))
def _row_of_device(ctx: Context, eqn: JaxprEqn, tiles: Tiles, targets: Targets) -> Tiles:
    return [own(ctx, jnp.asarray(ctx.place.lookup(np.array(eqn.params["table"])), jnp.int32))]


@region(partition_id_p, doc=Doc(free="the device's own number"))
def _partition_id(ctx: Context, eqn: JaxprEqn, tiles: Tiles, targets: Targets) -> Tiles:
    return [own(ctx, ctx.place.device_id().astype(jnp.int32))]


IN_REGION = RegionRule(_run_manually)  # of any operator there
