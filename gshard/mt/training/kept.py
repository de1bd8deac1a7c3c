"""What a run keeps to start again at once: its layout, and its compiled step.

The layout of a run with `devices.layout=auto` is chosen once, by forecasts alone, and kept in the
run's folder: the first process chooses it, the others get the same one, and a run that is resumed
reads it. It is chosen for one shape of batches and serves the other shapes too: the batch is split
alike, and the state has the same shardings in all of them.

JAX's cache has a key of the lowered program: a step that was compiled before is traced, partitioned
and lowered in order to be found, which takes as long as loading it. The step of `gshard train`
follows from less: gshard's source files, the versions of its libraries, the run's settings, the
types of the arguments, the devices, and the switches of JAX and XLA. The compiled step is kept
under a key of all these, beside JAX's own entries, and loaded from there.

A function of a user's program may close over anything, so that there is no such key: only a run's
step is kept. Code that a process changes after import is not in the key either, so that only
commands ask for it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable

import gshard
from gshard.errors import UserError
from gshard.mt import _jax, atomic, hosts
from gshard.mt._jax import CheckedCache
from gshard.mt.launch.company import fingerprint

LAYOUT = "layout.json"
_SECONDS = 60.0  # for the search, about


def layout_of_run(
    folder: Path, step: Callable[..., Any], arguments: tuple[Any, ...], devices: int
) -> gshard.Layout:
    """The layout in the run's folder, or a new one for a step on these arguments."""
    path = folder / LAYOUT
    if hosts.is_first() and not path.is_file():
        found = gshard.auto(step, *arguments, devices=devices, seconds=_SECONDS, donate_argnums=0)
        with atomic.new_file(path) as part:
            found.save(part)
    text = hosts.text_of_first(path.read_text(encoding="utf-8") if hosts.is_first() else "")
    if not path.is_file() or path.read_text(encoding="utf-8") != text:  # a folder of this host
        with atomic.new_file(path) as part:
            part.write_text(text, encoding="utf-8")
    try:
        layout = gshard.Layout.load(path)
    except ValueError as error:
        raise UserError(f"{error}; remove the file to have another layout chosen") from None
    if layout.devices != devices:
        raise UserError(
            f"{path} is a layout for {layout.devices} devices, and the run has {devices}; remove "
            "the file to have another one chosen, or train on as many devices as before"
        )
    return layout


def for_shapes(layout: gshard.Layout, arguments: tuple[Any, ...]) -> gshard.Layout:
    """The layout for a batch of another shape.

    A dim of the batch that has fewer rows than devices is replicated. Annotations inside name the
    shapes of the batch that they were chosen for, and are left out.
    """
    leaves = jax.tree_util.tree_flatten_with_path(arguments)[0]
    shapes = {jax.tree_util.keystr(path): tuple(np.shape(leaf)) for path, leaf in leaves}
    given = [shapes.get(a.path, a.shape) for a in layout.annotations]
    if all(a.shape == shape for a, shape in zip(layout.annotations, given, strict=True)):
        return layout
    sizes = layout.mesh

    def fitted(annotation: Any, shape: tuple[int, ...]) -> Any:
        dims = tuple(
            axes if math.prod(sizes[a] for a in axes) <= rows else ()
            for axes, rows in zip(annotation.dims, shape, strict=True)
        )
        return dataclasses.replace(annotation, shape=shape, dims=dims)

    annotations = tuple(map(fitted, layout.annotations, given))
    return dataclasses.replace(layout, annotations=annotations, inside=())


_NAME = "gshard_step-"
_FORMAT = 1
_VARIABLES = ("XLA_", "JAX_", "GSHARD_", "LIBTPU_", "TPU_", "CUDA_", "NVIDIA_", "NCCL_")
# What changes neither a program nor where it runs.
_FILES = ("jax_compilation_cache_dir", "JAX_COMPILATION_CACHE_DIR", "jax_dump_ir_to")


def key_of(settings: Mapping[str, object], arguments: Any, devices: Sequence[jax.Device]) -> str:
    """The key of the step with these settings for arguments of these types on these devices."""
    leaves, tree = jax.tree.flatten(arguments)
    types = [f"{jax.typeof(x)} {getattr(x, 'sharding', None)}" for x in leaves]
    switches = {name: value for name, value in jax.config.values.items() if name not in _FILES}
    variables = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_VARIABLES) and name not in _FILES
    }
    parts = {
        "format": _FORMAT,
        "code": fingerprint(switches, settings),
        "contexts": _jax.trace_context(),
        "variables": variables,
        "arguments": [str(tree), *types],
        "devices": [f"{d.id} {d.platform} {d.device_kind}" for d in devices],
        "hardware": _jax.hardware_of(devices),
    }
    text = json.dumps(parts, sort_keys=True, default=str)
    text = re.sub(r" at 0x[0-9a-f]+", "", text)  # where an object is in memory
    return _NAME + hashlib.sha256(text.encode()).hexdigest()


class KeptStep:
    """A step that was found: it is called like a compiled one."""

    def __init__(self, loaded: jax.stages.Compiled, arguments: Any):
        self._loaded, self._arguments = loaded, arguments
        self._shardings, _ = loaded.input_shardings

    def __call__(self, *args: Any) -> Any:
        """Run it."""
        return self._loaded(*args)

    def place(self, *args: Any) -> Any:
        """The arguments under the step's shardings."""
        return jax.device_put(args, self._shardings)

    @property
    def in_info(self) -> Any:
        """The arguments as shapes with their shardings."""

        def struct(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        return jax.tree.map(struct, self._arguments, self._shardings)


def find(key: str, arguments: Any, devices: Sequence[jax.Device]) -> KeptStep | None:
    """The step under a key, if it is there and can be loaded."""
    cache = _cache(devices)
    entry = None if cache is None else cache.get(key)
    if entry is None:
        return None
    try:
        program, results = pickle.loads(entry)
        loaded = serialize_executable.deserialize_and_load(
            program,
            jax.tree.structure((arguments, {})),
            jax.tree.structure(results),
            devices[0].client,
            devices,
        )
    except (ValueError, TypeError, RuntimeError, LookupError, EOFError, AttributeError,
            ImportError, pickle.PickleError):  # fmt: skip
        return None  # of other versions than the key says: it is compiled
    return KeptStep(loaded, arguments)


def keep(key: str, compiled: Any, devices: Sequence[jax.Device]) -> bool:
    """Put a compiled step under its key, unless it cannot be loaded elsewhere; whether it was put.

    Callbacks into Python and wrapped arguments exist in their own process only.
    """
    cache = _cache(devices)
    if cache is None:
        return False
    try:
        if _jax.calls_python(compiled):
            return False
        program, _, tree = serialize_executable.serialize(compiled)
    except (ValueError, NotImplementedError):  # JAX cannot serialize it: it is compiled again
        return False
    results = jax.tree.unflatten(tree, range(tree.num_leaves))  # trees cannot be pickled
    cache.put(key, pickle.dumps((program, results)))
    return True


def _cache(devices: Sequence[jax.Device]) -> Any:
    """JAX's cache of compiled programs, if there is one and all devices are this process's own.

    An executable is a pickle: it is read from a folder of this user's own alone.
    """
    cache = _jax.program_cache(devices[0].client) if jax.process_count() == 1 else None
    return cache if cache is None or isinstance(cache, CheckedCache) else CheckedCache(cache)
