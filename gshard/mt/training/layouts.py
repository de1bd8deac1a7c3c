"""The layout of a run with `devices.layout=auto`: chosen once, and kept in the run's folder.

The first process chooses it, by forecasts alone; the others get the same one. A run that is resumed
reads it. It is chosen for one shape of batches and serves the other shapes too: the batch is split
alike, and the state has the same shardings in all of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import gshard
from gshard.mt import atomic, hosts
from gshard.mt.errors import UserError

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
