"""What a value is taken to be while a program is checked, and how tiles are compared with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from gshard.checking.bounds import is_inexact, magnitude, roundoff
from gshard.moving.seen import Held
from gshard.replaying.tiles import assembled, place_of, plain, real, summed, wide
from gshard.tensors.keys import is_key_type


@dataclass(frozen=True, eq=False)
class Shadow:
    """The value that the devices have, put together; or, if they do not have it, what it would be.

    The latter is known up to a `slack`, element by element; None: it is exact. Of an unreduced
    value, `summands` is the sum of the summands' absolute values.
    """

    value: Any
    slack: np.ndarray | None = None
    summands: np.ndarray | None = None


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
    if not held.partial or not is_inexact(value.dtype):
        return Shadow(value)
    sizes = [None if t is None else magnitude(plain(t)) for t in tiles]
    slack = 2 * roundoff(value.dtype) * magnitude(value)  # the sum is rounded once
    return Shadow(value, slack, assembled(sizes, held))


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
        key = (id(tiles[device]), int(held.sharding.tile_index[device]))
        if place is None or (key in seen and not held.partial):
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
    return Gap(
        worst.worst, count, worst.device, worst.index, worst.got, worst.expected, worst.bound
    )


def _of_summands(
    tiles: Sequence[Any], held: Held, known: dict[int, np.ndarray]
) -> dict[int, np.ndarray]:
    """What rounding of the summands of a partial sum allows; 0 for other values."""
    if not held.partial or not is_inexact(plain(tiles[next(iter(known))]).dtype):
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
