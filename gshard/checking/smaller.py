"""Smaller sizes for a program, with the same plan: what a proof for thousands of devices runs on.

A size keeps the shape of its tiles: one that divides stays one that divides, and the last tiles of
one that does not stay short, or empty. Sizes that the function depends on, as by a reshape to
numbers of its own, stay. A plan depends on what is sent and computed, so that smaller programs are
planned for devices with as much less memory, latency and work.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from gshard.moving.available import Held

Sizes = dict[int, int]
Resized = Callable[[Sizes, int], Any]  # lowered for sizes so many times smaller; traced, for 0
_TIMES = (256, 64, 16, 4)  # smaller than before: what is tried
_SMALL = 8  # sizes up to this stay


def with_sizes(tree: Any, sizes: Sizes) -> Any:
    """The types of arrays with other sizes; all else as it is."""

    def smaller(x: Any) -> Any:
        is_array = isinstance(x, jax.ShapeDtypeStruct)
        return x.update(shape=tuple(sizes.get(n, n) for n in x.shape)) if is_array else x

    return jax.tree.map(smaller, tree)


def tiles_by_size(held: Mapping[Any, Sequence[Held]]) -> dict[int, int]:
    """Into how many tiles dims of each size are split, at most."""
    found: dict[int, int] = defaultdict(lambda: 1)
    for each in held.values():
        for h in each:
            for size, tiles in zip(h.shape, h.sharding.tiles, strict=False):
                found[size] = max(found[size], tiles)
    return found


def smaller_size(size: int, tiles: int, times: int) -> int:
    """A size about so many times smaller, whose tiles are full, short and empty like before."""
    if size <= _SMALL:
        return size
    local = -(-size // tiles)
    rows = max(2, local // times)
    if tiles == 1:
        return min(size, rows + size % 2)
    full, rest = divmod(size, local)
    missing = rows - min(rows - 1, -(-rest * rows // local))
    as_before = rows * full + rows - (local - rest)  # as many rows of padding, if that is possible
    if rest and local - rest < rows and -(-as_before // tiles) == rows:
        return min(size, as_before)
    return min(size, rows * full + rows - missing)


def reduced(
    resized: Resized, whole: Any, sizes: Sequence[int], tiles: Mapping[int, int]
) -> tuple[Any, Sizes, bool]:
    """A lowering for smaller sizes, what was taken for which size, and whether the plan is that of
    `whole`: the smallest of that plan, or else of the plan that has most in common with it."""
    wanted, found, free = plan_of(whole), [], sizes
    for times in _TIMES:
        tried = {n: smaller_size(n, tiles[n], times) for n in free}
        if _made(resized, tried, 0) is None:
            tried = _that_fit(resized, tried)
            free = list(tried)
        made = _made(resized, tried, times)
        if made is None:
            continue
        changed = {old: new for old, new in tried.items() if old != new}
        apart = sum((plan_of(made) - wanted).values()) + sum((wanted - plan_of(made)).values())
        if not apart:
            return made, changed, True
        found.append((apart, made, changed))
    if not found:
        return whole, {}, True
    _, made, changed = min(found, key=lambda each: each[0])
    return made, changed, False


def plan_of(lowered: Any) -> Counter[tuple[str, str, int]]:
    """The collectives of a program: their kinds, lines and groups; of combined ones, each."""
    each = [m for c in lowered.collectives for m in c.members or (c,)]
    return Counter((c.kind, c.source, c.group_size) for c in each)


def _that_fit(resized: Resized, tried: Sizes) -> Sizes:
    """The sizes that can change together, of those that are tried, one after the other."""
    fits: Sizes = {}
    for size, new in tried.items():
        if _made(resized, {**fits, size: new}, 0) is not None:
            fits[size] = new
    return fits


def _made(resized: Resized, sizes: Sizes, times: int) -> Any | None:
    try:
        return resized(sizes, times)
    except Exception:  # any error: the user's function is not made for these sizes
        return None
