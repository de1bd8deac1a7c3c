"""The tiles of all devices compared with what they should be: equal in the field, or different."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from gshard.checking.exact import field
from gshard.checking.exact.number import (
    UNKNOWN,
    Exact,
    Value,
    at,
    beside,
    by_parts,
    is_float,
    plain,
    spread,
)
from gshard.checking.exact.pointwise import bits_of
from gshard.checking.tiles import Tiling

_ROUNDING = 4096  # units in the last place by which floats alone are compared


@dataclass(frozen=True)
class Gap:
    """How many elements differ, and the first of them."""

    elements: int = 0
    device: int = 0
    index: tuple[int, ...] = ()
    got: Any = None
    expected: Any = None
    why: str = ""
    proved: bool = True  # equal in the field, and not within rounding
    degree: float = 1.0


def gap_between(got: Value, wanted: Value, tiling: Tiling, active: Any, dtype: Any) -> Gap:
    """What the active devices have, compared with the tiles of what it should be."""
    manual, count = tiling.sharding.manual, tiling.count
    here, devices = (got, np.arange(count)) if manual else tiling.reduced(got)
    there = wanted if manual else tiling.cut(wanted)
    if not plain(there).size:
        return Gap()
    real = np.ones((1,), bool) if manual else tiling.real
    alone = len(plain(here)) == len(plain(there)) == len(real) == 1
    if not alone:
        on = np.broadcast_to(active, (count,)).reshape(-1, *(1,) * (real.ndim - 1))
        real = (real & on)[devices]
        if len(plain(there)) > 1 and len(devices) < count:
            there = at(there, devices)
    proved, degree, why = True, 1.0, ""
    if isinstance(here, Exact) and isinstance(there, Exact):
        proved = UNKNOWN not in (here.sum_bits, there.sum_bits)
        degree = max(here.degree, there.degree)
        needed = min(there.sum_bits, bits_of(dtype)) if is_float(dtype) else 0
        if proved and here.sum_bits < needed:  # a reduction may come after the operator
            why = f"summed in {here.sum_bits} bits instead of {needed}"
        bad = np.not_equal(here.one, there.one) if proved else _apart(here.f, there.f, dtype)
        if there.sum_bits == UNKNOWN:  # exact numbers have no NaN for this, as for log(-1)
            bad = bad & ~np.isnan(there.f)
    else:
        bad = np.not_equal(plain(here), plain(there))
    if not why and not bad.any():
        return Gap(proved=proved, degree=degree)
    bad = np.broadcast_to((bad | bool(why)) & beside(real, bad), (len(devices), *bad.shape[1:]))
    rank = 1 + len(tiling.shape) if not manual else bad.ndim
    bad = bad.any(tuple(range(rank, bad.ndim)))  # of keys, and of floats that share an integer
    elements = int(np.count_nonzero(bad)) // (len(devices) if alone else 1)
    if not elements:
        return Gap(proved=proved, degree=degree)
    place = tuple(int(n) for n in np.argwhere(bad)[0])
    device = int(devices[place[0]])
    index = place[1:] if manual else tiling.position(device, place[1:])
    values = [plain(x)[(place[0] if len(plain(x)) > 1 else 0, *place[1:])] for x in (here, there)]
    return Gap(elements, device, index, values[0], values[1], why, proved, degree)


def _apart(got: np.ndarray, wanted: np.ndarray, dtype: Any) -> np.ndarray:
    """Where floats differ by more than rounding in an operator of many steps."""
    unit = float(jnp.finfo(dtype).eps) / 2 if is_float(dtype) else 0.0
    size = np.abs(np.where(np.isfinite(wanted), wanted, 0.0))
    limit = _ROUNDING * unit * (size + size.max(initial=0.0))
    same = (got == wanted) | (np.isnan(got) & np.isnan(wanted))
    return ~(same | (np.abs(got - wanted) <= limit))


def adopted(got: Value, wanted: Value, tiling: Tiling, proved: bool) -> Value:
    """A value that is right, taken to be what it should be: one array of both programs."""
    if not tiling.sharding.unreduced and (tiling.sharding.manual or tiling.is_even):
        return wanted if tiling.sharding.manual else tiling.cut(wanted)
    if proved:
        return got
    manual = tiling.sharding.manual
    own, right = (spread(x, tiling.count) for x in (got, wanted if manual else tiling.cut(wanted)))
    if manual or not tiling.sharding.unreduced:
        return replace(own, r=right.r, e=right.e)
    total, first = tiling.reduced(got)

    def mended(part: np.ndarray, sums: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        part = np.array(part)
        part[first] = field.sub(wanted[first], field.sub(sums, part[first]))
        return part

    return replace(own, **by_parts(mended, own, total, right))
