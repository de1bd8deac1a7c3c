"""Measure the CPU of this machine: `python -m gshard.forecast.measure > my-cpu.toml`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

_TEMPLATE = """\
# Measured by `python -m gshard.forecast.measure` on {cores} cores; the rates are what one of
# {devices} virtual devices gets while the others rest.
name = "cpu"
memory = {memory}
memory_bandwidth = {bandwidth:.3g}
compiler = "cpu"

[flops]
float32 = {float32:.3g}
bfloat16 = {bfloat16:.3g}
float64 = {float64:.3g}

[network]
kind = "switch"
devices_per_node = 4096
inside_bandwidth = {copied:.3g}
outside_bandwidth = {copied:.3g}
inside_seconds = {started:.3g}
outside_seconds = {started:.3g}

[reached]
operator_seconds = {operator:.3g}
"""


def main() -> None:
    """Print the machine as TOML."""
    import os

    bandwidth = _bandwidth()
    print(
        _TEMPLATE.format(
            cores=os.cpu_count(),
            devices=jax.device_count(),
            memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            bandwidth=bandwidth,
            float32=_products("float32"),
            bfloat16=_products("bfloat16"),
            float64=_products("float32") / 2,
            copied=bandwidth / 2,
            started=20e-6,
            operator=_operator(),
        ),
        end="",
    )


def _seconds(fn: Callable[..., Any], *args: jax.Array, times: int = 5) -> float:
    """The least of several runs: what the machine can do when nothing else disturbs it."""
    jax.block_until_ready(fn(*args))
    best = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        jax.block_until_ready(fn(*args))
        best = min(best, time.perf_counter() - start)
    return best


def _products(dtype: str, n: int = 1536) -> float:
    a = jnp.ones((n, n), dtype)
    return 2 * n**3 / _seconds(jax.jit(jnp.matmul), a, a)


def _bandwidth(n: int = 2**25) -> float:
    a = jnp.ones(n, jnp.float32)
    return 2 * a.nbytes / _seconds(jax.jit(lambda a: a + 1), a)


def _operator(count: int = 100) -> float:
    """Starting a small operator inside a program: a chain that XLA cannot fuse."""
    a = jnp.ones((8, 8))

    def chain(a: jax.Array) -> jax.Array:
        for _ in range(count):
            a = jnp.cumsum(a @ a, axis=0)
        return a

    return _seconds(jax.jit(chain), a) / (2 * count)


if __name__ == "__main__":
    main()
