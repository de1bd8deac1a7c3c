"""What translation takes from JAX's private modules, all of it about a run's processes.

They are imported when they are needed: a translation on a CPU runs without JAX.

Entries of JAX's cache of compiled programs are verified before they are loaded. JAX passes the
contents of a file to XLA, which loads them as native code: a flipped bit, or a file that a killed
process left incomplete, can crash the process. Here every entry begins with a checksum of its key
and contents. One that does not match is removed, and its program is compiled again. A checksum
finds damage, and no malice: whoever can write to the folder could have code run here. A folder or
an entry that others can write to is not used.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gshard.untrusted import own_folder, printable, refuse_of_others


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


_NAME = "-checked"  # entries that JAX alone has written have other names
_DIGEST = hashlib.sha256().digest_size


class CheckedCache:
    """A cache of JAX's, with checksums; `made` is one that keeps files in a folder."""

    def __init__(self, made: Any):
        self._made, self._path = made, made._path
        self._is_remote = "://" in str(self._path)  # a bucket, which has its own permissions
        self._is_own = self._is_remote or _is_own(Path(self._path).resolve())

    def get(self, key: str) -> bytes | None:
        """What is kept under a key, if it is as it was written."""
        found = self._made.get(key + _NAME) if self._is_own else None
        if found is None:
            return None
        value = bytes(found[_DIGEST:])
        with contextlib.suppress(OSError):
            if not self._is_remote:
                refuse_of_others(self._file(key), os.lstat(self._file(key)))
            if found[:_DIGEST] == _checksum(key, value):
                return value
        with contextlib.suppress(OSError):  # JAX writes no entry that is there already
            self._file(key).unlink()
        return None

    def put(self, key: str, value: bytes) -> None:
        """Keep this under a key, unless something is there."""
        if not self._is_own:
            return
        self._made.put(key + _NAME, _checksum(key, value) + value)
        if not self._is_remote:
            with contextlib.suppress(OSError):
                os.chmod(self._file(key), 0o600)  # whatever the umask is

    def _file(self, key: str) -> Any:
        return self._path / f"{key}{_NAME}-cache"


@functools.cache
def _is_own(folder: Path) -> bool:
    """Whether only this user can write to a folder; if not, a line says that it is not used."""
    try:
        os.close(own_folder(folder))
    except OSError as error:
        about = f"{printable(str(folder))}: {error.strerror}"
        print(f"gshard: compiled programs are not kept: {about}", file=sys.stderr)
        return False
    return True


def _checksum(key: str, value: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\0" + value).digest()
