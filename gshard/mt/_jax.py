"""What translation takes from JAX's private modules, all of it about a run's processes.

They are imported when they are needed: a translation on a CPU runs without JAX.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def process_count() -> int:
    """The processes of this program; where JAX was never imported, it is one."""
    return sys.modules["jax"].process_count() if "jax" in sys.modules else 1


def coordination() -> Any:
    """How the processes of a program reach each other beside collectives; None for one alone."""
    from jax._src import distributed

    return distributed.global_state.client


def wrap_program_cache(wrap: Callable[[Any], Any]) -> None:
    """Let `wrap` have the cache of compiled programs whenever JAX opens one."""
    from jax._src import compilation_cache

    made = compilation_cache.LRUCache
    if getattr(made, "wrapped_by", None) is wrap:
        return

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrap(made(*args, **kwargs))

    wrapped.wrapped_by = wrap  # type: ignore[attr-defined]
    compilation_cache.LRUCache = wrapped
    compilation_cache.reset_cache()  # it may be open already


def cache_in_every_process() -> None:
    """Let every process write what it compiles to JAX's cache, where the first alone does.

    On CPUs the keys of the cache name the process. What the others compile is never found under
    the first one's keys, and would be compiled again at every start.
    """
    from jax._src import compiler, distributed

    write, state = compiler._cache_write, distributed.global_state

    def written(*args: Any, **kwargs: Any) -> None:
        process, state.process_id = state.process_id, 0
        try:
            write(*args, **kwargs)
        finally:
            state.process_id = process

    if write.__name__ != written.__name__:
        compiler._cache_write = written


def program_cache(backend: Any) -> Any:
    """The cache of compiled programs, with `get` and `put`; None if there is none."""
    from jax._src import compilation_cache

    if not compilation_cache.is_cache_used(backend):
        return None
    return compilation_cache._get_cache(backend)


def trace_context() -> str:
    """What JAX's caches of traced functions depend on beside the arguments."""
    from jax._src import config

    return str(config.trace_context())


def hardware_of(devices: Any) -> list[str]:
    """What programs compiled for these devices depend on."""
    from jax._src.lib import xla_client

    client = devices[0].client
    try:
        found = str(xla_client.get_topology_for_devices(list(devices)).fingerprint())
    except (RuntimeError, AttributeError):  # of a backend, or a release, that has none
        found = ""
    return [client.platform, client.platform_version, found]


def calls_python(compiled: Any) -> bool:
    """Whether a compiled program calls back into this process."""
    unloaded = compiled._executable._unloaded_executable
    return bool(unloaded.keepalive or unloaded.host_callbacks)
