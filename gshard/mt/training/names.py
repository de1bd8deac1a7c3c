"""The arrays of a model by name: how checkpoints and releases store them."""

from __future__ import annotations

from typing import Any

import jax

from gshard import UnevenArray


def named(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths, as `encoder.dense.self_norm.scale`.

    An array that does not divide over its devices is saved by its logical value.
    """
    leaves = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda leaf: isinstance(leaf, UnevenArray)
    )
    return {
        _name(path): leaf.logical() if isinstance(leaf, UnevenArray) else leaf
        for path, leaf in leaves
    }


def unnamed(leaves: dict[str, Any], like: Any) -> Any:
    """The tree `like`, with the leaves that `named` gave."""
    return jax.tree_util.tree_map_with_path(lambda path, _: leaves[_name(path)], like)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".") or "value"
