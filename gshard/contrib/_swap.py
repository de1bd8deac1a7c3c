"""A library's own wrapper around `jax.jit`, with `jax.jit` replaced by `gshard.jit`.

Such a wrapper decides what is static, unpacks modules into arrays and packs them again; the library
still does all that. Only the function of arrays that it compiles is partitioned.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import gshard
from gshard import _jax

# What `gshard.jit` takes beyond `jax.jit`: `devices`, `partitioner` and the like.
OWN_KEYWORDS = frozenset(inspect.signature(gshard.jit).parameters) - frozenset(
    inspect.signature(jax.jit).parameters
)
# What `jax.jit` keeps under the name of its keyword.
SAME = (
    *("static_argnums", "static_argnames", "donate_argnums", "donate_argnames"),
    *("device", "backend", "keep_unused", "inline"),
)


def take_own(keywords: dict[str, Any]) -> dict[str, Any]:
    """The keywords that are gshard's alone, removed from `keywords`."""
    return {name: keywords.pop(name) for name in OWN_KEYWORDS & keywords.keys()}


def as_array(leaf: Any) -> Any:
    """An array without memory for a `jax.ShapeDtypeStruct`: Equinox traces arrays alone."""
    is_array = isinstance(leaf, jax.ShapeDtypeStruct)
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape) if is_array else leaf


def partitioned(jitted: Any, own: dict[str, Any]) -> Any:
    """`gshard.jit` of the function that `jax.jit` was given, with the same keywords and `own`."""
    info = _jax.jit_info(jitted)
    keywords = {name: getattr(info, name) for name in SAME}
    for side in ("in_shardings", "out_shardings"):
        leaves = getattr(info, f"{side}_leaves")
        given = [x if isinstance(x, jax.sharding.Sharding | jax.P) else None for x in leaves]
        keywords[side] = jax.tree.unflatten(getattr(info, f"{side}_treedef"), given)
    return gshard.jit(
        jitted.__wrapped__, compiler_options=dict(info.compiler_options_kvs), **keywords, **own
    )


class LibraryLowered(gshard.Lowered):
    """A `gshard.Lowered` whose `compile` takes and returns the library's own objects."""

    def __init__(self, lowered: gshard.Lowered, compiled: Callable[..., Any]):
        vars(self).update(vars(lowered))
        self._of_library = compiled

    def compile(self, compiler_options: dict[str, Any] | None = None) -> Any:
        """The program, compiled by XLA, to be called like the function that was lowered."""
        return self._of_library(compiler_options=compiler_options)

    @property
    def in_shardings(self) -> Any:
        """The shardings of the arrays among the arguments, by their paths in the library."""
        shardings = self._program.input_shardings()
        names = self._own().captured.argument_names[-len(shardings) :]
        return dict(zip(names, shardings, strict=True))
