"""Faults that are smaller than rounding, planted into the partitioner: a part of `prove`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gshard
from gshard.moving import collectives
from gshard.moving.nodes import code_of

D = 8


def _without_a_small_element(right: Any, place: Any, x: Any, *more: Any) -> Any:
    """A row of a million times smaller size is left out of the sum."""
    part = jnp.where(place.device_id() == 4, jnp.asarray(_ROWS[9]), 0)
    return right(place, x - part, *more)


def _in_bfloat16(right: Any, place: Any, x: Any, *more: Any) -> Any:
    """Each part is rounded before the sum, and not the sum after it."""
    return right(place, x.astype(jnp.bfloat16), *more).astype(x.dtype)


def _scaled(right: Any, place: Any, x: Any, *more: Any) -> Any:
    """A factor of 1 + 2**-23, the rounding of float32."""
    return right(place, x, *more) * np.float32(1 + 2.0**-23)


_ROWS = np.random.default_rng(0).random((16, 4)).astype(np.float32) + 1
_ROWS[9] *= 1e-7


def of_faults() -> bool:
    """Faults of every sum over devices, and swapped tiles, one at a time."""
    zeros = np.zeros((16, 4), np.float32)
    sums: Callable[[Any], Any] = lambda x: gshard.split(x, 0, D).sum(0)  # noqa: E731
    moved: Callable[[Any], Any] = lambda x: gshard.replicate(gshard.split(x, 0, D) * 2.0)  # noqa: E731
    swapped = lambda *_, **__: (tuple(range(D))[::-1],)  # noqa: E731
    right = collectives.all_reduce
    rows = [
        (
            "a row of a millionth of the size left out of a sum",
            sums,
            _ROWS,
            _without_a_small_element,
        ),
        ("a sum of float32 made in bfloat16", sums, _ROWS, _in_bfloat16),
        ("a factor of 1 + 2**-23", sums, _ROWS, _scaled),
        ("tiles that are all zeros swapped", moved, zeros, None),
    ]
    print("| fault | found | floats differ, relatively, by | what it says |\n|---|---|---:|---|")
    found = []
    for name, fn, x, change in rows:
        code_of.cache_clear()
        jax.clear_caches()
        kept = collectives._covering
        if change is None:
            collectives._covering = swapped
        else:
            collectives.all_reduce = lambda *a, c=change: c(right, *a)
        report = gshard.check(lambda x, fn=fn: fn(x), x, devices=D)
        collectives.all_reduce, collectives._covering = right, kept
        found.append(not report.ok)
        first = report.first
        apart = (
            0.0
            if first is None
            else abs(first.got - first.expected) / max(abs(first.expected), 1e-30)
        )
        text = "" if first is None else f"{first.operator}{first.why and ', ' + first.why}"
        print(f"| {name} | {'yes' if found[-1] else 'NO'} | {apart:.0e} | {text} |", flush=True)
    code_of.cache_clear()
    return all(found)
