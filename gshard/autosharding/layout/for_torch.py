"""A layout as PyTorch reads it: placements by parameter, for DTensor, FSDP2 and its plans."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax

from gshard.autosharding.layout.annotations import Dims, dims_on
from gshard.autosharding.traced import path_name


@dataclasses.dataclass(frozen=True)
class ForTorch:
    """A layout for PyTorch: its text is a program that applies it to `model`.

    `placements`, by the name of a parameter, and `inputs`, by the path of an input, have one
    placement of `torch.distributed.tensor` for each axis of `mesh`. The axes in `data` split the
    inputs: weights that they split too are those of FSDP, gathered where they are used. Along the
    others weights stay where they are, as in tensor parallelism.
    """

    mesh: Mapping[str, int]
    placements: Mapping[str, tuple[Any, ...]]
    inputs: Mapping[str, tuple[Any, ...]]
    data: tuple[str, ...]

    def __str__(self) -> str:
        sizes, names = tuple(self.mesh.values()), tuple(self.mesh)
        lines = [f'mesh = init_device_mesh("cuda", {sizes}, mesh_dim_names={names})']
        for axis in names:
            lines += self._fully_sharded(axis) if axis in self.data else self._parallel(axis)
        lines.append("placements = {")
        for pattern, placed in _by_layer(self.placements).items():
            lines.append(f'    "{pattern}": [{", ".join(map(_shown, placed))}],')
        return "\n".join([*lines, "}"])

    def _along(self, axis: str) -> dict[str, int]:
        """The dim of each parameter that an axis splits."""
        at = list(self.mesh).index(axis)
        found = {name: placed[at] for name, placed in self.placements.items()}
        return {name: p.dim for name, p in found.items() if p.is_shard()}

    def _parallel(self, axis: str) -> list[str]:
        """Linear layers: a weight split by its outputs is columnwise, by its inputs rowwise."""
        styles = ("ColwiseParallel()", "RowwiseParallel()")
        weights = {n: d for n, d in self._along(axis).items() if n.endswith(".weight") and d < 2}
        named = {n.removesuffix(".weight"): styles[d] for n, d in weights.items()}
        plan = [f'    "{name}": {style},' for name, style in _by_layer(named).items()]
        return [f'parallelize_module(model, mesh["{axis}"], {{', *plan, "})"] if plan else []

    def _fully_sharded(self, axis: str) -> list[str]:
        dims = self._along(axis)
        if not dims:
            return [f'replicate(model, device_mesh=mesh["{axis}"])  # data parallel']
        other = {name: f"Shard({dim})" for name, dim in dims.items() if dim}
        lines = [f'fully_shard(model, mesh=mesh["{axis}"])  # and each layer before it']
        lines += [
            f"#   shard_placement_fn: {name} by {dim}" for name, dim in _by_layer(other).items()
        ]
        kept = len(self.placements) - len(dims)
        return lines + ([f"#   ignored_params: {kept} that stay replicated"] if kept else [])


def for_torch(given: Any, shardings: Any, mesh: Mapping[str, int]) -> ForTorch:
    """The arguments of a lowered program as placements; a dict's strings are parameters' names."""
    try:
        from torch.distributed.tensor import Replicate, Shard
    except ImportError:
        raise ImportError("to_torch needs PyTorch: pip install 'gshard[torch]'") from None

    def placed(dims: Dims) -> tuple[Any, ...]:
        where = {axis: dim for dim, axes in enumerate(dims) for axis in axes}
        return tuple(Shard(where[axis]) if axis in where else Replicate() for axis in mesh)

    placements: dict[str, tuple[Any, ...]] = {}
    inputs: dict[str, tuple[Any, ...]] = {}
    data: set[str] = set()
    leaves = jax.tree_util.tree_flatten_with_path((given, {}))[0]
    for (path, _), sharding in zip(leaves, jax.tree.leaves(shardings), strict=True):
        dims = dims_on(sharding, mesh) or ()
        name = getattr(path[-1], "key", None)
        if len(path) > 2 and isinstance(name, str):
            placements[name] = placed(dims)
        else:
            inputs[path_name(path)] = placed(dims)
            data.update(axis for axes in dims for axis in axes)
    return ForTorch(dict(mesh), placements, inputs, tuple(axis for axis in mesh if axis in data))


def _shown(placement: Any) -> str:
    return f"Shard({placement.dim})" if placement.is_shard() else "Replicate()"


def _by_layer(named: Mapping[str, Any]) -> dict[str, Any]:
    """Equal entries of all layers as one, with * in the place of the layer's number."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in named.items():
        found.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", name), {})[name] = value
    shown: dict[str, Any] = {}
    for pattern, values in found.items():
        first = next(iter(values.values()))
        alike = all(value == first for value in values.values())
        shown |= {pattern: first} if alike else values
    return shown
