"""What translation takes from JAX's private modules, all of it about a run's processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax._src import compilation_cache as _compilation_cache
from jax._src import compiler as _compiler
from jax._src import distributed as _distributed


def coordination() -> Any:
    """How the processes of a program reach each other beside collectives; None for one alone."""
    return _distributed.global_state.client


def wrap_program_cache(wrap: Callable[[Any], Any]) -> None:
    """Let `wrap` have the cache of compiled programs whenever JAX opens one."""
    made = _compilation_cache.LRUCache
    if getattr(made, "wrapped_by", None) is wrap:
        return

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrap(made(*args, **kwargs))

    wrapped.wrapped_by = wrap  # type: ignore[attr-defined]
    _compilation_cache.LRUCache = wrapped
    _compilation_cache.reset_cache()  # it may be open already


def cache_in_every_process() -> None:
    """Let every process write what it compiles to JAX's cache, where the first alone does.

    On CPUs the keys of the cache name the process. What the others compile is never found under
    the first one's keys, and would be compiled again at every start.
    """
    write, state = _compiler._cache_write, _distributed.global_state

    def written(*args: Any, **kwargs: Any) -> None:
        process, state.process_id = state.process_id, 0
        try:
            write(*args, **kwargs)
        finally:
            state.process_id = process

    if write.__name__ != written.__name__:
        _compiler._cache_write = written
