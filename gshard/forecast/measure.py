"""Measure the CPU of this machine: `python -m gshard.forecast.measure > my-cpu.toml`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

_TEMPLATE = """\
# Measured by `python -m gshard.forecast.measure` on {cores} cores; the rates are what each of
# {devices} virtual devices gets while all of them work, the best of many repetitions.
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
inside_bandwidth = {sent:.3g}
outside_bandwidth = {sent:.3g}
inside_seconds = {started:.3g}
outside_seconds = {started:.3g}
single_step = true

[efficiency]
operator_seconds = {operator:.3g}
"""


def measured(rounds: int = 20) -> str:
    """The machine as TOML: its devices, those of other processes included.

    Other programs may be using the machine: everything is measured in turns, many times, and the
    best of each counts, so that a busy period does not distort one measurement alone.
    """
    import os

    probes = {
        "bandwidth": _bandwidth(),
        "float32": _products("float32"),
        "bfloat16": _products("bfloat16"),
        "float64": _products("float64"),
        "operator": _operator(),
        "started": _exchange(20, 8),
        "sent": _exchange(4, 2**20),
    }
    best: dict[str, float] = dict.fromkeys(probes, 0.0)
    for _ in range(rounds):
        for name, (amount, run) in probes.items():
            best[name] = max(best[name], amount / _seconds(run))
    return _TEMPLATE.format(
        cores=os.cpu_count(),
        devices=jax.device_count(),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        **{**best, "operator": 1 / best["operator"], "started": 1 / best["started"]},
    )


Probe = tuple[float, Callable[[], Any]]  # an amount of work, and a function that does it once


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def _ready(fn: Callable[..., Any], rows: jax.Array) -> Callable[[], Any]:
    """A compiled call that has run once: `fn` on each row, every virtual device with its own.

    All devices work at once, as in a partitioned program: they share the cores.
    """
    devices = len(rows)
    mesh = jax.make_mesh((devices,), ("d",), (jax.sharding.AxisType.Auto,))
    by_row = jax.sharding.PartitionSpec("d")
    everywhere = jax.shard_map(
        lambda a: fn(a[0])[None], mesh=mesh, in_specs=by_row, out_specs=by_row
    )
    placed = jax.device_put(rows, jax.sharding.NamedSharding(mesh, by_row))
    compiled = jax.jit(everywhere).lower(placed).compile()
    jax.block_until_ready(compiled(placed))
    return lambda: compiled(placed)


def _products(dtype: str, n: int = 1024) -> Probe:
    with jax.enable_x64(dtype == "float64"):
        a = jnp.ones((jax.device_count(), n, n), dtype)
        return 2.0 * n**3, _ready(lambda a: a @ a, a)


def _bandwidth(n: int = 2**22) -> Probe:
    a = jnp.ones((jax.device_count(), n), jnp.float32)
    return 2.0 * 4 * n, _ready(lambda a: a + 1, a)


def _operator(count: int = 100) -> Probe:
    """Starting a small operator inside a program: a chain that XLA cannot fuse."""

    def chain(a: jax.Array) -> jax.Array:
        for _ in range(count):
            a = jnp.cumsum(a @ a, axis=0)
        return a

    return 2.0 * count, _ready(chain, jnp.ones((jax.device_count(), 8, 8)))


def _exchange(count: int, size: int) -> Probe:
    """Messages one after the other to the next device: how many, or their bytes if they are large.

    Devices are the virtual ones, or those of several processes.
    """
    devices = jax.device_count()

    def chain(a: jax.Array) -> jax.Array:
        for _ in range(count):
            a = jax.lax.ppermute(a, "d", [(i, (i + 1) % devices) for i in range(devices)])
        return a

    amount = float(count) if size < 1024 else 4.0 * count * size
    return amount, _ready(chain, jnp.ones((devices, size)))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    print(measured(), end="")
