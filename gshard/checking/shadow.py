"""What a value is taken to be while a program is checked, and how tiles are compared with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from gshard.checking.bounds import is_inexact, magnitude, roundoff
from gshard.checking.replaying.tiles import assembled, place_of, plain, real, summed, wide
from gshard.moving.seen import Held
from gshard.tensors.keys import is_key_type
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import Identity


@dataclass(frozen=True, eq=False)
class Shadow:
    """The value that the devices have, put together; or, if they do not have it, what it would be.

    The latter is known up to a `slack`, element by element; None: it is exact. Of an unreduced
    value, `summands` is the sum of the summands' absolute values.
    """

    value: Any
    slack: np.ndarray | None = None
    summands: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Parts:
    """A value of a manual region: what each device has; None for a device that does not run."""

    of: tuple[Shadow | None, ...]


Known = Shadow | Parts


def of_device(known: Known, device: int) -> Shadow | None:
    """What one device has of a value in a manual region; tensors from outside are replicated."""
    return known.of[device] if isinstance(known, Parts) else known


def merged(new: Known | None, old: Known | None) -> Known | None:
    """The new value; of a manual region, the old one on devices that have no new one."""
    if not isinstance(new, Parts) or old is None:
        return new
    both = ((part, of_device(old, d)) for d, part in enumerate(new.of))
    return Parts(tuple(b if a is None else a for a, b in both))


@dataclass(frozen=True)
class Gap:
    """The element that differs most, and how many differ; `worst` is in units of the bound."""

    worst: float
    elements: int = 0
    device: int = 0
    index: tuple[int, ...] = ()
    got: Any = None
    expected: Any = None
    bound: float = 0.0


def shadow_of(tiles: Sequence[Any], held: Held, aval: Any) -> Shadow:
    """The value that devices hold; random keys are keys again."""
    value: Any = assembled(tiles, held)
    if is_key_type(aval.dtype):
        value = jax.random.wrap_key_data(value, impl=aval.dtype._impl.name)
    if not held.sharding.unreduced or not is_inexact(value.dtype):
        return Shadow(value)
    sizes = [None if t is None else magnitude(plain(t)) for t in tiles]
    slack = 2 * roundoff(value.dtype) * magnitude(value)  # the sum is rounded once
    return Shadow(value, slack, assembled(sizes, held))


def resummed(known: Shadow, devices: int) -> Shadow:
    """The same value with room for another order of its sum: reduced, or unreduced otherwise."""
    if known.summands is None:
        return known
    rounding = 4 * (devices + 1) * roundoff(known.value.dtype) * known.summands
    return Shadow(known.value, rounding + (0.0 if known.slack is None else known.slack))


def taken(tiles: Sequence[Any], held: Held, aval: Any) -> Known:
    """A value as the devices have it."""
    if held.sharding.manual:
        return Parts(tuple(None if tile is None else Shadow(tile) for tile in tiles))
    return shadow_of(tiles, held, aval)


def gap_to(tiles: Sequence[Any], held: Held, expected: Known) -> Gap:
    """What devices have of a value, beside what it should be, within its slack."""
    if held.sharding.manual or isinstance(expected, Parts):
        own = Parts(tuple(None if tile is None else Shadow(tile) for tile in tiles))
        return gap_of_parts(own, expected, len(tiles))
    expected = resummed(expected, len(tiles))
    slack = 0.0 if expected.slack is None else expected.slack
    return compare(tiles, held, plain(expected.value), slack)


def gap_of_parts(got: Known, wanted: Known, count: int) -> Gap:
    """Two values of a manual region, device by device; only devices that have both count."""
    gaps = []
    for device in range(count):
        a, b = of_device(got, device), of_device(wanted, device)
        if a is None or b is None:
            continue
        expected = plain(b.value)
        slack = sum((s.slack for s in (a, b) if s.slack is not None), np.zeros(()))
        single = Held(None, Sharding.replicated(expected.ndim, 1), expected.shape)
        gaps.append(replace(compare([a.value], single, expected, slack), device=device))
    worst = max(gaps, key=lambda gap: gap.worst, default=Gap(0.0))
    return replace(worst, elements=sum(gap.elements for gap in gaps))


def compare(
    tiles: Sequence[Any], held: Held, expected: np.ndarray, bound: np.ndarray | float
) -> Gap:
    """The tiles of all devices, copies included, beside what they should be."""
    worst = Gap(0.0)
    known = summed(tiles, held)
    extra = _of_summands(tiles, held, known)
    limits = np.broadcast_to(np.asarray(bound, np.float64), expected.shape)
    seen: set[Any] = set()
    count = 0
    for device, tile in known.items():
        place = place_of(held, device, tile.shape)
        key = (Identity(tiles[device]), int(held.sharding.tile_index[device]))
        if place is None or (key in seen and not held.sharding.unreduced):
            continue
        seen.add(key)
        got, wanted = real(tile, place), expected[place]
        limit = limits[place] + real(extra[device], place)
        units = in_units(got, wanted, limit)
        count += int((units > 1).sum())
        if units.size and units.max() > worst.worst:
            at = np.unravel_index(int(units.argmax()), units.shape)
            starts = [s.start for s in place] + [0] * (len(at) - len(place))
            index = tuple(int(a + b) for a, b in zip(at, starts, strict=True))
            worst = Gap(float(units.max()), 0, device, index, got[at], wanted[at], float(limit[at]))
    return replace(worst, elements=count)


def _of_summands(
    tiles: Sequence[Any], held: Held, known: dict[int, np.ndarray]
) -> dict[int, np.ndarray]:
    """What rounding of the summands of a partial sum allows; 0 for other values."""
    if not held.sharding.unreduced or not is_inexact(plain(tiles[next(iter(known))]).dtype):
        return {d: np.zeros(tile.shape) for d, tile in known.items()}
    arrays = [None if t is None else magnitude(plain(t)) for t in tiles]
    u = roundoff(plain(tiles[next(iter(known))]).dtype)
    return {d: 8 * u * total for d, total in summed(arrays, held).items()}


def in_units(got: np.ndarray, wanted: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """The difference of every element in units of its bound; infinity where none is allowed."""
    equal = got == wanted if got.dtype == wanted.dtype else wide(got) == wide(wanted)
    if not is_inexact(wanted.dtype):
        return np.where(equal | np.isinf(limit), 0.0, np.inf)
    both = np.isnan(wide(got)) & np.isnan(wide(wanted))
    with np.errstate(all="ignore"):
        units = np.abs(wide(got) - wide(wanted)) / limit
    units = np.where(np.isnan(units), np.inf, units)
    return np.where(equal | both | np.isinf(limit), 0.0, units)
