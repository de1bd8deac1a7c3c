"""JAX made ready for a run: which devices, how many, and the other hosts.

Without an accelerator the CPU poses as several devices, so that a laptop runs the same partitioned
program as a cluster. That has to be configured before JAX is first used.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from gshard.errors import UserError
from gshard.mt import _jax
from gshard.mt._jax import CheckedCache
from gshard.mt.config import DeviceConfig
from gshard.mt.launch import company, status
from gshard.mt.launch.company import MissingHostsError, NobodyCameError, fingerprint
from gshard.mt.launch.environment import Hosts
from gshard.nn.strategy import ONE_DEVICE, Strategy
from gshard.untrusted import own_folder

_COMING = 120  # seconds that processes wait for each other at the start
_ASKING = 10  # of these they look for the first one themselves
_ALONE = 60  # seconds of silence after which JAX takes another process for dead
_WATCHED = 3600  # the same, where a parent watches
_LEAVING = 60  # seconds that processes wait for each other at the end
_TOLD = 1000  # bytes of what processes tell each other
# Switches of JAX that make other programs of the same code.
_SWITCHES = (
    "jax_default_dtype_bits", "jax_default_matmul_precision", "jax_default_prng_impl",
    "jax_disable_jit", "jax_disable_most_optimizations", "jax_enable_custom_prng",
    "jax_enable_x64", "jax_numpy_dtype_promotion", "jax_random_seed_offset",
    "jax_threefry_partitionable",
)  # fmt: skip
VIRTUAL = 8  # CPU devices in all to train on, where there is no accelerator
MOST = 4096  # each virtual device has threads of its own


def start(
    devices: int = 0,
    hosts: Hosts = Hosts(),  # noqa: B008  (frozen)
    *,
    virtual: int = VIRTUAL,
    settings: Mapping[str, object] | None = None,
) -> None:
    """Connect the hosts and bring up `devices` devices: all there are, or `virtual` of a CPU.

    All processes must run the same code with the same `settings`.
    """
    if devices < 0:
        raise UserError(f"devices.count is {devices}; it is 0 for all, or how many")
    if devices > MOST:
        raise UserError(f"devices.count is {devices}; {MOST:,} virtual devices are the most")
    if devices % hosts.count:
        raise UserError(f"{devices} devices do not divide among {hosts.count} processes")
    # In a notebook or a test, JAX may have its devices already, and then keeps them.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", max(1, (devices or virtual) // hosts.count))
    if hosts.count > 1:
        _connect(hosts)
        _introduce(hosts, settings or {})
    try:
        there = jax.device_count()
    except RuntimeError as error:  # JAX_PLATFORMS, or a driver
        first = (str(error).splitlines() or [""])[0]
        raise UserError(f"JAX could not be initialized: {first[:300]}") from None
    if devices > there:
        raise UserError(
            f"{devices} devices asked for, but there are {there} ({jax.devices()[0].device_kind})"
        )


def _connect(hosts: Hosts) -> None:
    """Connect to the other processes through the coordinator, which listens on its address only.

    JAX ends a process that has lost another, from C++ and without an exception. Where a parent
    watches, it notices sooner and can name the process; JAX then gets a long timeout.
    """
    # Its handler would swallow SIGTERM, at which a training saves and stops.
    jax.config.update("jax_enable_preemption_service", False)
    watched = status.is_watched()
    if hosts.index:
        _until_it_listens(hosts.coordinator)
    else:
        _refuse_to_listen_elsewhere(hosts.coordinator)
    if not watched:
        company.explain_aborts(company.explained, MissingHostsError.status)
    failed: list[Exception] = []

    def meet() -> None:
        try:
            jax.distributed.initialize(
                hosts.coordinator,
                hosts.count,
                hosts.index,
                cluster_detection_method="deactivate",
                initialization_timeout=2 * _COMING,
                heartbeat_timeout_seconds=_WATCHED if watched else _ALONE,
                shutdown_timeout_seconds=_LEAVING,
                coordinator_bind_address=hosts.coordinator,
            )
        except Exception as error:
            failed.append(error)

    # In a thread, since at its own time limit JAX aborts the process, and hears no Ctrl-C before.
    meeting = threading.Thread(target=meet, name="meeting", daemon=True)
    meeting.start()
    meeting.join(_COMING)
    who = f"process {hosts.index} of {hosts.count} could not meet the others at {hosts.coordinator}"
    if meeting.is_alive():
        raise NobodyCameError(f"{who} within {_COMING} s: not all of them came")
    if failed and isinstance(failed[0], (RuntimeError, ValueError)):
        first = (str(failed[0]).strip().splitlines() or [type(failed[0]).__name__])[0][:200]
        raise MissingHostsError(f"{who}: {first}")
    if failed:
        raise failed[0]


def _introduce(hosts: Hosts, settings: Mapping[str, object]) -> None:
    """Say who this process is and what it runs, and hear it of the others."""
    others = company.Company(_jax.coordination(), hosts.index, hosts.count)
    company.join(others)
    switches = {name: jax.config.values[name] for name in _SWITCHES if name in jax.config.values}
    others.agree(fingerprint(switches, {"--processes": hosts.count, **settings}))


def agree(values: Mapping[str, object]) -> None:
    """An error, on all processes, if not all have these values."""
    others = company.current()
    if others is not None and jax.process_count() > 1:
        others.agree({name: str(value) for name, value in values.items()})


def _refuse_to_listen_elsewhere(address: str) -> None:
    """An error if the coordinator cannot listen there: JAX would crash."""
    host, _, port = address.rpartition(":")
    until = time.monotonic() + _ASKING
    while True:
        try:
            found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
            with socket.socket(found[0][0]) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(found[0][4])
            return
        except (OSError, UnicodeError) as error:
            # The name of a pod may be known a little later than the pod.
            if not isinstance(error, socket.gaierror) or time.monotonic() > until:
                why = getattr(error, "strerror", None) or error
                raise MissingHostsError(f"process 0 cannot listen at {address}: {why}") from None
        time.sleep(0.2)


def _until_it_listens(address: str) -> None:
    """Wait until an address accepts connections: JAX, once refused, retries only after a second."""
    host, _, port = address.rpartition(":")
    until = time.monotonic() + _ASKING
    while time.monotonic() < until:
        with contextlib.suppress(OSError, UnicodeError):
            socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
            return
        time.sleep(0.02)


def is_first() -> bool:
    """Whether this process is the one that writes what all of them share."""
    return jax.process_index() == 0


def wait_for_all(reason: str) -> None:
    """Return when all processes are here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(reason)


def text_of_first(text: str) -> str:
    """The text that the first process has, on all of them, however long."""
    if jax.process_count() == 1:
        return text
    mine = np.frombuffer(text.encode(), np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.array(len(mine))))
    padded = mine if is_first() else np.zeros(length, np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(padded)).tobytes().decode()


def told_by_any(text: str) -> str:
    """The text of the first process that has one, on all of them; its beginning, if it is long."""
    if jax.process_count() == 1:
        return text
    mine = text.encode()[:_TOLD].ljust(_TOLD, b"\0")
    told = multihost_utils.process_allgather(np.frombuffer(mine, np.uint8))
    texts = [row.tobytes().rstrip(b"\0").decode(errors="ignore") for row in np.asarray(told)]
    return next(filter(None, texts), "")


def chosen(config: DeviceConfig) -> list[jax.Device]:
    """The devices of a run."""
    return jax.devices()[: config.count or None]


def strategy(config: DeviceConfig) -> Strategy:
    """How the model is spread over those devices."""
    count = len(chosen(config))
    if config.layout == "auto":
        if max(config.tensor, config.stages) > 1 or config.split_update:
            raise UserError(
                "devices.layout=auto chooses what devices.tensor, devices.stages and "
                "devices.split_update set; leave those out, or use devices.layout=paper"
            )
        return ONE_DEVICE  # no annotations: the layout brings them
    tensor, stages, cut = config.tensor, config.stages, config.split_update
    if count % (tensor * stages):
        many = f"devices.stages={stages} times " if stages > 1 else ""
        raise UserError(f"{many}devices.tensor={tensor} does not divide {count} devices")
    if cut and stages > 1:
        raise UserError("devices.split_update is for weights on all devices: not with stages")
    microbatches = (config.microbatches or 2 * stages) if stages > 1 else 0
    return Strategy(count // tensor, tensor, cut, stages, microbatches)


def matmul_flops(devices: int, dtype: str = "float32") -> float:
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


def cache_programs() -> None:
    """Keep compiled programs in the user's own cache, so that a run that is resumed starts at once.

    Compiled programs are native code. They are never kept in a run's folder, which people copy from
    each other, and a cache that others can write to is not used: checksums find damage, and no
    malice. `JAX_COMPILATION_CACHE_DIR` names another place.
    """
    if jax.config.jax_compilation_cache_dir is None and (folder := _own_cache()):
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    _jax.wrap_program_cache(CheckedCache)
    if jax.process_count() > 1 and jax.default_backend() == "cpu":
        _jax.cache_in_every_process()


def _own_cache() -> Path | None:
    """A folder for compiled programs that only this user can write to, or None."""
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = root / "gshard" / "programs"
        os.close(own_folder(folder))
    except (OSError, RuntimeError):  # no home, or not writable
        return None
    return folder
