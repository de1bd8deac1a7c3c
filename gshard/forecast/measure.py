"""Measure the devices of this machine: `python -m gshard.forecast.measure > mine.toml`."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gshard.forecast.hardware import Efficiency, Hardware, present
from gshard.forecast.topology import Network


def measured(rounds: int = 20, rate_of: Callable[[Sequence[float]], float] = max) -> str:
    """The machine as TOML: its devices, those of other processes included.

    Other programs may be using the machine: everything is measured in turns, many times, so that a
    busy period does not distort one measurement alone. The best of each counts, or what `rate_of`
    makes of them: who compares with the median of some steps takes the median here, too. A single
    accelerator has nobody to send to: the links are those of its data sheet.
    """
    device, devices = jax.devices()[0], jax.device_count()
    on_cpu = device.platform == "cpu"
    rows, values, sent = (1024, 2**22, 2**20) if on_cpu else (8192, 2**28, 2**24)
    dtypes = ("float32", "float32_exact", "bfloat16", "float64")
    probes = {
        "bandwidth": _bandwidth(values),
        "updates": _updates(values // 4),
        **{dtype: _products(dtype, rows) for dtype in dtypes},
        "operator": _operator(),
        "started": _exchange(20, 8),
        "sent": _exchange(4, sent),
    }
    times = [{name: _seconds(run) for name, (_, run) in probes.items()} for _ in range(rounds)]
    rates = {name: rate_of([done / t[name] for t in times]) for name, (done, _) in probes.items()}
    seconds = {name: 1 / rates[name] for name in ("operator", "started")}
    found = {name: float(f"{rate:.3g}") for name, rate in (rates | seconds).items()}
    links: dict[str, Any] = dict.fromkeys(("inside_bandwidth", "outside_bandwidth"), found["sent"])
    links |= dict.fromkeys(("inside_seconds", "outside_seconds"), found["started"])
    network = Network("switch", devices_per_node=4096, single_step=on_cpu, **links)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Hardware(
        device.device_kind,
        {dtype: found[dtype] for dtype in dtypes},
        memory if on_cpu else device.memory_stats()["bytes_limit"],
        found["bandwidth"],
        network if on_cpu or devices > 1 else present().network,
        Efficiency(
            updates=min(1.0, round(found["updates"] / found["bandwidth"], 3)),
            operator_seconds=found["operator"],
        ),
        device.platform,
    ).as_toml(f"By `python -m gshard.forecast.measure`: {devices} devices while all of them work.")


Probe = tuple[float, Callable[[], Any]]  # an amount of work, and a function that does it once


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def _ready(fn: Callable[..., Any], rows: jax.Array) -> Callable[[], Any]:
    """A compiled call that has run once: `fn` on each row, on all devices at once."""
    mesh = jax.make_mesh((len(rows),), ("d",), (jax.sharding.AxisType.Auto,))
    by_row = jax.sharding.PartitionSpec("d")
    on_all = jax.shard_map(lambda a: fn(a[0])[None], mesh=mesh, in_specs=by_row, out_specs=by_row)
    placed = jax.device_put(rows, jax.sharding.NamedSharding(mesh, by_row))
    compiled = jax.jit(on_all).lower(placed).compile()
    jax.block_until_ready(compiled(placed))
    return lambda: compiled(placed)


def _products(dtype: str, n: int) -> Probe:
    """A product and its gradients: CPUs take 1.5 times as long for the one that sums over rows."""
    name, _, exact = dtype.partition("_")
    precision = jax.default_matmul_precision("highest" if exact else None)
    with jax.enable_x64(name == "float64"), precision:
        a = jnp.ones((jax.device_count(), n, n), name)
        return 6.0 * n**3, _ready(jax.grad(lambda a: jnp.sum((a @ a) ** 2)), a)


def _bandwidth(n: int) -> Probe:
    a = jnp.ones((jax.device_count(), n), jnp.float32)
    return 2.0 * 4 * n, _ready(lambda a: a + 1, a)


def _updates(n: int, rows: int = 8, times: int = 32) -> Probe:
    """Rows that are written in place: XLA for CPUs has one core do that."""

    def written(a: jax.Array) -> jax.Array:
        def one(i: Any, buffer: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_index_in_dim(buffer, a[0] + i, i % rows, 0)

        return jax.lax.fori_loop(0, times, one, a)

    return 2.0 * 4 * n * times, _ready(written, jnp.ones((jax.device_count(), rows, n)))


def _operator(count: int = 100) -> Probe:
    """Starting a small operator inside a program: a chain that XLA cannot fuse."""

    def chain(a: jax.Array) -> jax.Array:
        for _ in range(count):
            a = jnp.cumsum(a @ a, axis=0)
        return a

    return 2.0 * count, _ready(chain, jnp.ones((jax.device_count(), 8, 8)))


def _exchange(count: int, size: int) -> Probe:
    """Messages one after the other to the next device: their number, or their bytes if large."""
    devices = jax.device_count()

    def chain(a: jax.Array) -> jax.Array:
        for _ in range(count):
            a = jax.lax.ppermute(a, "d", [(i, (i + 1) % devices) for i in range(devices)])
        return a

    amount = float(count) if size < 1024 else 4.0 * count * size
    return amount, _ready(chain, jnp.ones((devices, size)))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    print(measured(), end="")
