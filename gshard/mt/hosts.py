"""JAX made ready for a run: which devices, how many, and the other hosts.

Without an accelerator the CPU poses as several devices, so that a laptop runs the same partitioned
program as a cluster. That has to be said before JAX is first used.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils

from gshard.mt.config import DeviceConfig
from gshard.mt.errors import UserError
from gshard.nn.strategy import Strategy

VIRTUAL = 8  # CPU devices in all, where there is no accelerator
MOST = 4096  # each virtual device has threads of its own


@dataclass(frozen=True)
class Hosts:
    """The processes of a run and which of them this is; one, unless said otherwise.

    With `automatic`, JAX finds the others by itself, as it can under Slurm, MPI or on TPUs.
    """

    coordinator: str = ""  # host:port of process 0
    count: int = 1
    index: int = 0
    automatic: bool = False


def start(devices: int = 0, hosts: Hosts = Hosts()) -> None:  # noqa: B008  (frozen)
    """Connect the hosts and bring up `devices` devices: all there are, or 8 virtual ones."""
    if devices < 0:
        raise UserError(f"devices.count is {devices}; it is 0 for all, or how many")
    if devices > MOST:
        raise UserError(f"devices.count is {devices}; {MOST:,} virtual devices are the most")
    wanted = devices or VIRTUAL
    if wanted % hosts.count:
        raise UserError(f"{wanted} devices do not divide among {hosts.count} processes")
    # In a notebook or a test, JAX may have its devices already, and then keeps them.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", wanted // hosts.count)
    if hosts.automatic or hosts.count > 1:
        _connect(hosts)
    if devices > jax.device_count():
        raise UserError(
            f"{devices} devices asked for, but there are {jax.device_count()} "
            f"({jax.devices()[0].device_kind})"
        )


def _connect(hosts: Hosts) -> None:
    if hosts.automatic:
        jax.distributed.initialize()
        return
    if not hosts.coordinator:
        raise UserError(f"{hosts.count} processes need --coordinator HOST:PORT, that of process 0")
    try:
        jax.distributed.initialize(hosts.coordinator, hosts.count, hosts.index)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"the hosts could not be connected: {error}") from None


def is_first() -> bool:
    """Whether this process is the one that writes what all of them share."""
    return jax.process_index() == 0


def wait_for_all(reason: str) -> None:
    """Go on when all processes are here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(reason)


def chosen(config: DeviceConfig) -> list[jax.Device]:
    """The devices of a run."""
    return jax.devices()[: config.count or None]


def strategy(config: DeviceConfig) -> Strategy:
    """How the model is spread over those devices."""
    count = len(chosen(config))
    if count % config.tensor:
        raise UserError(f"devices.tensor={config.tensor} does not divide {count} devices")
    return Strategy(count // config.tensor, config.tensor, config.split_update)


def peak_flops(devices: int, dtype: str = "float32") -> float:
    """Multiplications and additions a second that a large matrix product reaches here.

    Measured, not looked up: it is what this machine, with whatever else runs on it, can do now.
    Virtual devices share one CPU and count once.
    """
    size = 1024 if jax.default_backend() == "cpu" else 8192
    a = jax.device_put(jnp.ones((size, size), dtype), jax.local_devices()[0])
    product = jax.jit(lambda a: a @ a)
    product(a).block_until_ready()
    best, until = 0.0, time.perf_counter() + 0.3
    while time.perf_counter() < until:
        begin = time.perf_counter()
        product(a).block_until_ready()
        best = max(best, 2 * size**3 / (time.perf_counter() - begin))
    return best * (jax.process_count() if jax.default_backend() == "cpu" else devices)


def cache_programs(folder: str | os.PathLike[str]) -> None:
    """Keep compiled programs in `folder`, so that a run that is resumed starts at once.

    Unless the user keeps them elsewhere already (`JAX_COMPILATION_CACHE_DIR`).
    """
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
