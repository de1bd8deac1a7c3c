"""Timing of compiled functions."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax


def milliseconds(run: Callable[..., Any], *args: Any, calls: int = 10, repeats: int = 3) -> float:
    """The median over repeats of the time of a call, after one to warm up."""
    jax.block_until_ready(run(*args))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(calls):
            out = run(*args)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - begin) / calls)
    return 1e3 * statistics.median(times)


def peak_gb() -> float:
    """The most memory that was ever in use on the device, in 10^9 bytes; 0 where it is unknown."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use", 0) / 1e9
