"""Trees of torch: their leaves, and results that JAX can take apart too."""

from __future__ import annotations

from typing import Any

import jax
from torch.utils import _pytree as pytree

flat, unflat = pytree.tree_flatten, pytree.tree_unflatten  # in torch's trees, None is a leaf


class _Structure:
    """The structure of a tree of torch, to be compared and kept in JAX's caches."""

    def __init__(self, spec: Any):
        self.spec, self.text = spec, repr(spec)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Structure) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


def for_jax(spec: Any) -> Any:
    """`spec`, whose own types, such as Hugging Face's outputs, are made known to JAX."""
    if spec.type is not None and jax.tree_util.all_leaves([_empty(spec)]):
        jax.tree_util.register_pytree_node(
            spec.type,
            lambda tree: (flat(tree)[0], _Structure(flat(tree)[1])),
            lambda structure, leaves: unflat(list(leaves), structure.spec),
        )
    for child in spec.children():
        for_jax(child)
    return spec


def _empty(spec: Any) -> Any:
    return unflat([0] * spec.num_leaves, spec)
