"""The tiles of all devices beside what they should be: equal in the field, or different."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from gshard.checking.exact import field
from gshard.checking.exact.number import Bits, Exact, Value, at, is_float, plain, spread
from gshard.checking.exact.other import UNKNOWN
from gshard.checking.exact.pointwise import bits_of
from gshard.checking.exact.tiles import Tiling

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
    """What the active devices have, beside the tiles of what it should be."""
    manual, count = tiling.sharding.manual, tiling.sharding.num_devices
    here, devices = (got, np.arange(count)) if manual else tiling.reduced(got)
    there = wanted if manual else tiling.cut(wanted)
    whole = plain(here)
    real = np.ones((1,) * whole.ndim, bool)
    if not manual:
        real = tiling.real.reshape(*tiling.real.shape, *(1,) * (whole.ndim - tiling.real.ndim))
    alone = len(plain(here)) == 1 and len(plain(there)) == 1 and len(real) == 1
    if not alone:
        here, there = spread(here, len(devices)), spread(there, count)
        real = np.broadcast_to(real, (count, *real.shape[1:]))[devices]
        on = np.broadcast_to(active, (count,))[devices]
        real = real & on.reshape(-1, *(1,) * (real.ndim - 1))
    if not alone and len(devices) < count:
        there = at(there, devices)
    exact = isinstance(here, Exact)
    bad: Any
    narrower, proved, degree, needed = False, True, 1.0, 0
    if exact:
        proved = UNKNOWN not in (here.sum_bits, there.sum_bits)
        needed = min(there.sum_bits, bits_of(dtype))  # a reduction may come after the operator
        narrower = proved and here.sum_bits < needed
        degree = max(here.degree, there.degree)
    if exact and not proved:
        bad = _apart(here.f, there.f, dtype)
    else:
        bad = np.not_equal(_residues(here), _residues(there))
    bad = (bad | narrower) & real
    if bad.ndim > whole.ndim:  # of keys, and of floats that share an integer
        bad = bad.any(tuple(range(whole.ndim, bad.ndim)))
    elements = int(np.count_nonzero(bad))
    if not elements:
        return Gap(proved=proved, degree=degree)
    place = tuple(int(n) for n in np.argwhere(bad)[0])
    device = 0 if alone else int(devices[place[0]])
    index = place[1:] if manual else tiling.position(device, place[1:])
    why = f"summed in {here.sum_bits} bits instead of {needed}" if narrower else ""
    values = plain(here)[place], plain(there)[place]
    return Gap(elements, device, index, *values, why, proved, degree)


def _residues(value: Value) -> np.ndarray:
    if isinstance(value, Bits):
        return value.tag.r
    return value.r if isinstance(value, Exact) else plain(value)


def _apart(got: np.ndarray, wanted: np.ndarray, dtype: Any) -> np.ndarray:
    """Where floats differ by more than rounding in an operator of many steps."""
    unit = float(jnp.finfo(dtype).eps) / 2 if is_float(dtype) else 0.0
    size = np.abs(np.where(np.isfinite(wanted), wanted, 0.0))
    limit = _ROUNDING * unit * (size + size.max(initial=0.0))
    same = (got == wanted) | (np.isnan(got) & np.isnan(wanted))
    return ~(same | (np.abs(got - wanted) <= limit))


def adopted(got: Exact, wanted: Exact, tiling: Tiling) -> Exact:
    """A value that is right within rounding, taken to be what it should be."""
    count, manual = tiling.sharding.num_devices, tiling.sharding.manual
    r = spread(wanted if manual else tiling.cut(wanted), count).r
    if tiling.sharding.unreduced and not manual:
        own, (total, first) = np.array(spread(got, count).r), tiling.reduced(got)
        own[first] = field.sub(r[first], field.sub(total.r, own[first]))
        r = own
    return replace(spread(got, count), r=r)
