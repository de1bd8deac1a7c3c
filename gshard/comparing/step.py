"""A training step as its author wrote it, with XLA's partitioner and with gshard's.

A step is a function of `jax.jit`, `gshard.jit`, `equinox.filter_jit` or `flax.nnx.jit`, a plain
function, or a module of torch, of which a step is made. Its shardings are those of its arguments,
of `in_shardings`, and of constraints inside.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NoReturn

import jax
from jax.dtypes import canonicalize_dtype

import gshard
from gshard.capture.calls import called_with, names_of
from gshard.comparing.torch_step import step_of_torch
from gshard.contrib._swap import as_array, partitioned
from gshard.forecast import Hardware, hardware
from gshard.jit import Jitted

# Where Equinox, Flax NNX and gshard's own wrappers of them keep the function of arrays.
_INSIDE = ("_wrapper", "_cached", "jitted_fn")

Change = Callable[[Any], Any]


class Step:
    """A step and its arguments, which may be abstract; of a torch module, in `parts`."""

    def __init__(
        self,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        remat: str | None = None,
        parts: int = 0,
    ):
        self._module: Any = step if hasattr(step, "named_parameters") else None  # of torch
        self._remat = remat
        if self._module is not None:
            step, args = step_of_torch(self._module, args, remat, parts)
        self._step: Any = step if hasattr(step, "lower") else gshard.jit(step)
        self.args = args
        self.name = getattr(step, "__name__", type(step).__name__)

    def with_remat(self) -> Step | None:
        """A step of a torch module with its repeated layers computed again, if there are any."""
        layers = re.compile(r".*\.\d+|\d+")
        names = self._module.named_modules() if self._module is not None and not self._remat else ()
        if not any(layers.fullmatch(name) for name, _ in names):
            return None
        return Step(self._module, self.args[2:], layers.pattern)

    def with_args(self, args: tuple[Any, ...]) -> Step:
        """The same step for other arguments."""
        if self._module is not None:  # is exported for the shapes of its inputs
            return Step(self._module, args[2:], self._remat)
        changed = copy.copy(self)
        changed.args = args
        return changed

    def by_xla(self) -> jax.stages.Compiled:
        """The program that XLA makes of it."""
        return self._lowered(lambda inside: _with_options(inside, partitioner="xla")).compile()

    @property
    def is_plain(self) -> bool:
        """Whether its arguments are those of the function that is partitioned."""
        return not any(hasattr(self._step, name) for name in _INSIDE)

    def by_gshard(
        self, machine: str | Hardware | None, arguments: Change | None = None, **keywords: Any
    ) -> gshard.Lowered:
        """The program that gshard makes of it for this hardware, with `keywords` of `gshard.jit`.

        `arguments` is applied to the arguments inside of it.
        """

        def changed(inside: Any) -> Any:
            own = inside if isinstance(inside, Jitted) else partitioned(inside, {})
            known = hardware(machine) if machine is not None else None
            return _with_options(own, arguments, hardware=known, **keywords)

        return self._lowered(changed)

    def by_auto(self, **how: Any) -> gshard.Layout:
        """What `gshard.auto` with these keywords reaches; constraints inside the step are kept."""

        class Searched:  # by the arguments that a library's wrapper passes on
            def __init__(self, inside: Any):
                self.inside = inside

            def lower(self, *args: Any) -> NoReturn:
                layout = gshard.auto(self.inside.__wrapped__, *map(_abstract, args), **how)
                if layout.lowered is not None:
                    arrays = [x for x in jax.tree.leaves(args) if hasattr(x, "shape")]
                    layout.lowered.named(names_of(arrays))
                raise _Found(layout)

        try:
            self._lowered(Searched)
        except _Found as found:
            return found.layout
        raise AssertionError

    def _lowered(self, change: Change) -> Any:
        own, args = getattr(self._step, "__wrapped__", self._step), self.args
        if self._module is not None:  # torch counts in 64 bits
            args = (*args[:2], *jax.tree.map(_available, args[2:]))
        if hasattr(self._step, "_cached"):
            args = jax.tree.map(as_array, args)
        called = called_with(own, args, {})
        with _all_frames(), called, _changed_inside(self._step, change) as step:
            lowered = step.lower(*args)
        return getattr(lowered, "lowered", lowered)  # Equinox's and NNX's have JAX's inside


def _available(leaf: Any) -> Any:
    """An input of a type that JAX has: of 32 bits, by default."""
    return leaf.update(dtype=canonicalize_dtype(leaf.dtype))


def _abstract(tree: Any) -> Any:
    """Arrays without their shardings, which `gshard.auto` is to choose."""

    def abstract(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else leaf

    return jax.tree.map(abstract, tree)


class _Found(Exception):  # noqa: N818  (ends a lowering that has a layout)
    def __init__(self, layout: gshard.Layout):
        self.layout = layout


@contextlib.contextmanager
def _changed_inside(step: Any, change: Change) -> Iterator[Any]:
    """The step while it has another function of arrays inside the wrapper of a library.

    NNX finds the objects of a call by the wrapper itself: a copy would not do.
    """
    name = next((name for name in _INSIDE if hasattr(step, name)), None)
    if name is None:
        yield change(step)
        return
    inside = getattr(step, name)
    with _changed_inside(inside, change) as changed:
        object.__setattr__(step, name, changed)
        try:
            yield step
        finally:
            object.__setattr__(step, name, inside)


def _with_options(inside: Any, arguments: Change | None = None, **own: Any) -> Any:
    """A function of `gshard.jit` with other options; one of `jax.jit` is XLA's already."""
    if not isinstance(inside, Jitted):
        return inside
    of_jax = {k: own.pop(k) for k in [*own] if k not in vars(inside.options)}
    keywords = replace(inside._keywords, of_jax={**inside._keywords.of_jax, **of_jax})
    fun: Any = inside.__wrapped__
    called = fun
    if arguments is not None:
        called = functools.wraps(fun)(lambda *args, **kwargs: fun(*arguments(args), **kwargs))
    return Jitted(keywords, replace(inside.options, **own), called)


@contextlib.contextmanager
def _all_frames() -> Iterator[None]:
    """A context in which HLO has all frames of a line: by default JAX keeps the ten innermost,
    which are often a library's."""
    limit = jax.config.jax_traceback_in_locations_limit
    jax.config.update("jax_traceback_in_locations_limit", -1)
    try:
        yield
    finally:
        jax.config.update("jax_traceback_in_locations_limit", limit)
