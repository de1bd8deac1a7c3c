"""Annotations of all weights of a tree at once: `fsdp` and `tensor_parallel`.

A tree is that of any library: an Equinox module, `nnx.state(model)`, Linen's variables, parameters
by their torch names, a dict. Leaves that are not arrays are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import jax
import numpy as np

from gshard.errors import nearest
from gshard.graph.source import here
from gshard.tensors.annotate import devices_of_trace, shard

T = TypeVar("T")
_SMALL = 4096  # elements: gathering less costs latency, and replicating it hardly any memory


def fsdp(tree: T, num_partitions: int | None = None) -> T:
    """Annotate every weight of `tree` to be split, as in FSDP and ZeRO-3.

    Each is split into `num_partitions`, by default one for each device, along its largest dim that
    divides; a weight of under 4,096 elements, or of which no dim divides, is left as it is.
    Outside of `gshard.jit` it returns the tree unchanged.
    """
    parts = devices_of_trace() if num_partitions is None else num_partitions
    return _annotated(tree, lambda path, shape, names: (None, _largest(shape, parts)), (parts, 1))


def tensor_parallel(
    tree: T,
    rules: Mapping[str, int] | Iterable[str],
    num_partitions: int | None = None,
    fsdp: int = 1,
) -> T:
    """Annotate the weights of `tree` that `rules` name to be split over `num_partitions` devices.

    `rules` give the dim to split by the path of a weight (`{"*.up.weight": 0, "*.down.weight": 1}`,
    the first pattern that matches counts), or are logical names of dims (`["heads", "mlp"]`) that
    Linen's `nn.with_partitioning` or NNX's `out_sharding` gave. With `fsdp`, devices are a mesh of
    `fsdp` rows: all weights are split over the rows too, along another dim. By default there are as
    many partitions as devices.
    """
    rows = fsdp if devices_of_trace() > 1 else 1
    parts = devices_of_trace() // rows if num_partitions is None else num_partitions
    matched: set[str] = set()
    seen: list[str] = []

    def chosen(
        path: str, shape: tuple[int, ...], names: tuple[str | None, ...]
    ) -> tuple[int | None, int | None]:
        seen.extend([path] if isinstance(rules, Mapping) else [n for n in names if n])
        dim = None
        if isinstance(rules, Mapping):
            if pattern := next((p for p in rules if fnmatchcase(path, p)), None):
                matched.add(pattern)
                dim = rules[pattern] % len(shape) if shape else None
        elif found := [n for n in names if n in wanted]:
            matched.update(found[:1])  # a device has one place along each mesh axis
            dim = names.index(found[0])
        return dim, _largest(shape, rows, dim)

    wanted = list(rules)
    annotated = _annotated(tree, chosen, (rows, parts))
    if unused := [rule for rule in wanted if rule not in matched and devices_of_trace() > 1]:
        raise ValueError(
            f"{here()}: tensor_parallel: no weight matches {unused[0]!r}"
            f"{nearest(unused[0], dict.fromkeys(seen))}"
        )
    return annotated


Choice = Callable[[str, tuple[int, ...], tuple[str | None, ...]], tuple[int | None, int | None]]


def _annotated(tree: T, chosen: Choice, mesh: tuple[int, int]) -> T:
    """The tree with each weight split over columns and rows of a mesh, by the dims `chosen`."""
    if devices_of_trace() == 1:
        return tree
    ids = np.arange(mesh[0] * mesh[1]).reshape(mesh)

    def annotated(path: Any, leaf: Any) -> Any:
        value = leaf if _names(leaf) is None else jax.tree.leaves(leaf)[0]
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            return leaf
        column, row = chosen(_path_name(path), value.shape, _names(leaf) or ())
        tiles = [1] * len(value.shape)
        over = ids if column is not None else ids[:, :1]
        over = over if row is not None else over[:1]
        for dim, count in ((row, over.shape[0]), (column, over.shape[1])):
            if dim is not None:
                tiles[dim] = count
        if over.size == 1:
            return leaf
        backwards = None not in (row, column) and (column or 0) < (row or 0)
        marked = shard(value, (over.T if backwards else over).reshape(tiles))
        return marked if value is leaf else jax.tree.map(lambda _: marked, leaf)

    is_box = lambda x: _names(x) is not None  # noqa: E731
    return jax.tree_util.tree_map_with_path(annotated, tree, is_leaf=is_box)


def _largest(shape: tuple[int, ...], parts: int, besides: int | None = None) -> int | None:
    """The largest dim of a weight that divides into parts, if it is worth splitting."""
    if parts == 1 or np.prod(shape) < _SMALL:
        return None
    fitting = [d for d, n in enumerate(shape) if n % parts == 0 and d != besides]
    return max(fitting, key=lambda d: shape[d], default=None)


def _names(leaf: Any) -> tuple[str | None, ...] | None:
    """The logical names of dims that a box of Linen or a variable of NNX has."""
    if isinstance(leaf, jax.Array | np.ndarray):
        return None
    found = getattr(leaf, "names", None) or getattr(leaf, "out_sharding", None)
    return tuple(found) if isinstance(found, tuple) else None


def _path_name(path: Iterable[Any]) -> str:
    """The path of a leaf, as rules have it: `blocks[3].mlp.up.weight`, of dicts too."""
    name = ""
    for key in path:
        part = getattr(key, "name", getattr(key, "key", getattr(key, "idx", key)))
        name += f"[{part}]" if isinstance(part, int) else f".{part}"
    return name.removesuffix(".value").removeprefix(".")  # NNX's variables and Linen's boxes
