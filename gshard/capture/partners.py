"""Modules of Equinox and Flax NNX under `gshard.jit`: which function of `gshard.contrib` to use.

Like `jax.jit`, `gshard.jit` traces Python numbers, and changes of a module in place are lost. Both
libraries have a `jit` of their own for that. Neither is imported here: a program that has none of
their modules does not need them.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax

F = TypeVar("F", bound=Callable[..., Any])


def advising(method: F) -> F:
    """`method`, whose errors name the Equinox modules in the call that have Python numbers."""

    @functools.wraps(method)
    def advised(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            note = _of_equinox((args, kwargs))
            if note is not None and note not in getattr(error, "__notes__", ()):
                error.add_note(note)
            raise

    return cast(F, advised)


def _of_equinox(arguments: Any) -> str | None:
    equinox = sys.modules.get("equinox")
    if equinox is None:
        return None
    modules = jax.tree.leaves(arguments, is_leaf=lambda x: isinstance(x, equinox.Module))
    for module in modules:
        if isinstance(module, equinox.Module):
            for path, leaf in jax.tree_util.tree_leaves_with_path(module):
                if isinstance(leaf, bool | int | float | complex):
                    name = type(module).__name__ + jax.tree_util.keystr(path)
                    return (
                        f"{name} is the Python {type(leaf).__name__} {leaf!r}, which gshard.jit "
                        "traces, as jax.jit does: use gshard.contrib.equinox.filter_jit, which "
                        "keeps it static, as equinox.filter_jit does"
                    )
    return None


def watched(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, with a warning when it changes an NNX module in place and does not return it."""

    @functools.wraps(fun)
    def traced(*args: Any, **kwargs: Any) -> Any:
        nnx = sys.modules.get("flax.nnx")
        if nnx is None:
            return fun(*args, **kwargs)
        variables = _nnx_variables(nnx, (args, kwargs))
        before = [variable.get_raw_value() for variable in variables.values()]
        results = fun(*args, **kwargs)
        returned = jax.tree.leaves(results)
        lost = [
            name
            for (name, variable), value in zip(variables.items(), before, strict=True)
            for now in [variable.get_raw_value()]
            if now is not value and not any(now is leaf for leaf in returned)
        ]
        if lost:
            _warn_of(lost, fun)
        return results

    return traced


def _nnx_variables(nnx: Any, arguments: Any) -> dict[str, Any]:
    """The variables of the NNX modules, optimizers and the like among the arguments, by name."""
    found: dict[str, Any] = {}
    for module in jax.tree.leaves(arguments, is_leaf=lambda x: isinstance(x, nnx.Pytree)):
        if isinstance(module, nnx.Pytree):
            for path, variable in nnx.iter_graph(module):
                if isinstance(variable, nnx.Variable):
                    name = ".".join((type(module).__name__, *map(str, path)))
                    found[name if name not in found else f"{name} ({len(found)})"] = variable
    return found


def _warn_of(lost: list[str], fun: Callable[..., Any]) -> None:
    more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
    warnings.warn(
        f"{getattr(fun, '__name__', 'the function')} changes {', '.join(lost[:3])}{more} in place, "
        "which gshard.jit forgets, as jax.jit does: use gshard.contrib.nnx.jit, which keeps it, as "
        "flax.nnx.jit does, or return the module",
        stacklevel=2,
    )
