"""Manual regions while a program is checked: every device has a value of its own.

An operator of a region is run on the operands of each device in turn, and a collective on those of
all devices. At the borders a tensor is cut into its parts, or put together of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as p

from gshard._jax import private_primitives
from gshard.checking.bounds import is_inexact, magnitude, roundoff
from gshard.checking.replaying.collectives import run_collective
from gshard.checking.replaying.tiles import assembled, cut, place_of, plain, wide
from gshard.checking.shadow import Known, Parts, Shadow, of_device, shadow_of
from gshard.moving.partial import copies_groups
from gshard.moving.seen import Held
from gshard.tensors.manual import (
    MANUAL,
    collective_p,
    over_groups_p,
    partition_id_p,
    row_of_device_p,
    to_auto_p,
    to_manual_p,
)
from gshard.tensors.tile import Identity

_AXIS = "devices"
(_reduce_scatter_p,) = private_primitives("lax.parallel", "reduce_scatter_p")
_REDUCING = (p.psum_p, p.pmax_p, p.pmin_p)
_SUMMING = (p.psum_p, _reduce_scatter_p)

Expected = Callable[[JaxprEqn, Sequence[Shadow]], list[Shadow]]


def is_manual(eqn: JaxprEqn, operands: Sequence[Known | None]) -> bool:
    """Whether an equation belongs to a manual region, or to its border."""
    return eqn.primitive in MANUAL or any(isinstance(x, Parts) for x in operands)


def expected_in_region(
    eqn: JaxprEqn, operands: Sequence[Known], count: int, expected: Expected
) -> list[Known]:
    """The results of an equation on `count` devices; `expected` has those on one of them."""
    if eqn.primitive is to_manual_p:
        return [_parts(eqn, operands[0], count)]
    if eqn.primitive is to_auto_p:
        return [_put_together(eqn, operands[0], count)]
    if eqn.primitive is partition_id_p:
        return [Parts(tuple(Shadow(np.int32(d)) for d in range(count)))]
    if eqn.primitive is row_of_device_p:
        return [Parts(tuple(Shadow(np.int32(n)) for n in eqn.params["table"]))]
    if eqn.primitive in (collective_p, over_groups_p):
        return _exchanged(_of_jax(eqn), operands, count)
    return _on_each(eqn, operands, count, expected)


def _on_each(
    eqn: JaxprEqn, operands: Sequence[Known], count: int, expected: Expected
) -> list[Known]:
    """An operator that sends nothing; equal operands give results once."""
    known: dict[tuple[Identity, ...], list[Shadow]] = {}
    found: list[list[Shadow] | None] = []
    for device in range(count):
        own = [of_device(x, device) for x in operands]
        mine = [x for x in own if x is not None]
        if len(mine) < len(own):  # the device does not run here
            found.append(None)
            continue
        key = tuple(Identity(x.value) for x in mine)
        if key not in known:
            known[key] = expected(eqn, mine)
        found.append(known[key])
    numbers = range(len(eqn.outvars))
    return [Parts(tuple(None if row is None else row[i] for row in found)) for i in numbers]


# ------------------------------------------------------------------------ borders


def _parts(eqn: JaxprEqn, tensor: Known, count: int) -> Parts:
    """Each device's part of a tensor; what is padding there may hold anything."""
    assert isinstance(tensor, Shadow)
    value = tensor.value
    sharding = eqn.params["annotation"].sharding
    shape = tuple(eqn.invars[0].aval.shape)
    held = Held(None, sharding, shape)
    slack = np.zeros(shape) if tensor.slack is None else tensor.slack
    tiles, slacks = (cut(x, sharding, shape) for x in (value, slack))
    first = set(sharding.devices[..., 0].ravel().tolist())
    found: list[Shadow | None] = []
    for device, (tile, own) in enumerate(zip(tiles, slacks, strict=True)):
        if eqn.params["copies"] == "first" and device not in first:
            found.append(Shadow(np.zeros_like(plain(tile))))
            continue
        place = place_of(held, device, own.shape)
        limit = np.full(plain(tile).shape, np.inf)
        if place is not None:
            real = tuple(slice(0, s.stop - s.start) for s in place)
            limit[real] = own[real].reshape(own[real].shape + (1,) * (limit.ndim - own.ndim))
        found.append(Shadow(tile, limit))
    return Parts(tuple(found))


def _put_together(eqn: JaxprEqn, parts: Known, count: int) -> Shadow:
    """The tensor that devices have the parts of."""
    sharding = eqn.params["annotation"].sharding
    held = Held(None, sharding, tuple(eqn.params["shape"]))
    own = [of_device(parts, device) for device in range(count)]
    tiles: list[Any] = [None if x is None else x.value for x in own]
    limits: list[Any] = [None if x is None else _slack(x) for x in own]
    if eqn.params["copies"] == "all" and sharding.replicas > 1:
        for group in copies_groups(sharding):
            values = [plain(tiles[d]) for d in group]
            total = np.sum([wide(x) for x in values], axis=0).astype(values[0].dtype)
            limit = np.sum([limits[d] for d in group], axis=0) + _of_sum(values)
            for device in group:
                tiles[device], limits[device] = total, limit
    limit = assembled(limits, held)
    return Shadow(shadow_of(tiles, held, eqn.outvars[0].aval).value, limit if limit.any() else None)


def _slack(shadow: Shadow) -> np.ndarray:
    """How far a value may be from what is known of it."""
    return np.zeros(plain(shadow.value).shape) if shadow.slack is None else shadow.slack


def _of_sum(values: Sequence[np.ndarray]) -> Any:
    """What rounding of a sum of a few arrays allows."""
    if not is_inexact(values[0].dtype):
        return 0.0
    sizes = np.sum([magnitude(x) for x in values], axis=0)
    return 4 * (len(values) + 1) * roundoff(values[0].dtype) * sizes


# ------------------------------------------------------------------------ collectives


def _of_jax(eqn: JaxprEqn) -> JaxprEqn:
    """A collective of a region as JAX's own, over one axis of all devices and its groups."""
    groups = eqn.params["groups"]
    if eqn.primitive is over_groups_p:
        primitive, params = eqn.params["primitive"], dict(eqn.params["settings"])
    else:
        dim = eqn.params["dim"]
        primitive, params = {
            "all_reduce": (p.psum_p, {}),
            "all_gather": (p.all_gather_p, {"all_gather_dimension": dim, "tiled": True}),
            "reduce_scatter": (_reduce_scatter_p, {"scatter_dimension": dim, "tiled": True}),
            "all_to_all": (p.all_to_all_p, {"split_axis": 0, "concat_axis": 0, "tiled": True}),
            "collective_permute": (p.ppermute_p, {}),
        }[eqn.params["kind"]]
    if primitive is p.ppermute_p:
        params |= {"axis_name": (_AXIS,), "perm": groups}
    else:
        name = "axes" if primitive in _REDUCING else "axis_name"
        params |= {name: (_AXIS,), "axis_index_groups": groups}
    return eqn.replace(primitive=primitive, params=params)


def _exchanged(eqn: JaxprEqn, operands: Sequence[Known], count: int) -> list[Known]:
    """The results of a collective on all devices; a sum is rounded, and what is sent is not."""
    sizes = {_AXIS: count}
    own = [[of_device(x, device) for device in range(count)] for x in operands]
    values = [[None if x is None else plain(x.value) for x in each] for each in own]
    results = run_collective(eqn, values, sizes)
    slacks = [
        [None if x is None else _slack(x) if is_inexact(plain(x.value).dtype) else plain(x.value)
         for x in each]
        for each in own
    ]  # fmt: skip
    summing = eqn.primitive if eqn.primitive not in _REDUCING else p.psum_p
    limits = run_collective(eqn.replace(primitive=summing), slacks, sizes)
    if eqn.primitive in _SUMMING:
        members = max(map(len, eqn.params["axis_index_groups"]))
        absolute = [[None if x is None else magnitude(x) for x in each] for each in values]
        sums = run_collective(eqn, absolute, sizes)
        for limit, total, value in zip(limits, sums, results, strict=True):
            for d in [d for d in range(count) if value[d] is not None]:
                if is_inexact(value[d].dtype):
                    rounding = 4 * (members + 1) * roundoff(value[d].dtype)
                    limit[d] = limit[d] + rounding * total[d]
    return [
        Parts(tuple(None if v is None else _shadow(v, s) for v, s in zip(*both, strict=True)))
        for both in zip(results, limits, strict=True)
    ]


def _shadow(value: np.ndarray, slack: Any) -> Shadow:
    return Shadow(value, np.asarray(slack, np.float64) if is_inexact(value.dtype) else None)
