"""The first stage of a lowering: from a traced function to one flat program in normal form."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from gshard import _jax
from gshard.capture.flatten import inline
from gshard.capture.inside import Places, places
from gshard.capture.placement import DeviceOrder
from gshard.capture.simplify import PASSES
from gshard.graph.history import History


@dataclass(frozen=True, eq=False)
class Variant:
    """A kind of lowering that a package above the core defines, as `gshard.reproducible` does.

    `passes` follow the normal forms; `rewrites` names those by shardings that run: all by default.
    `opaque_first`: the program's first argument, which the user did not give, is `Place.opaque`.
    """

    passes: tuple[Callable[[ClosedJaxpr], ClosedJaxpr], ...] = ()
    rewrites: Collection[str] | None = None
    compiler_options: Mapping[str, Any] = field(default_factory=dict)
    opaque_first: bool = False


USUAL = Variant()


@dataclass(frozen=True, eq=False)
class Captured:
    """A user's function as a flat program, and all that later stages need of the function.

    `original` is the program before normal forms; `closed_over` are its first arguments, and
    `types` those of its results.
    """

    flat: ClosedJaxpr
    original: ClosedJaxpr
    name: str
    argument_names: tuple[str, ...]
    closed_over: tuple[Any, ...]
    types: tuple[Any, ...]

    @functools.cached_property
    def places(self) -> Places:
        """Where in the user's code the tensors of the program are made."""
        return places(self.flat)

    variant: Variant


def capture(
    traced: jax.stages.Traced, order: DeviceOrder, variant: Variant, history: History
) -> Captured:
    """The flat program of a traced function: calls inlined, logical shapes, normal forms."""
    original = inline(traced.jaxpr, order, as_meant=bool(variant.passes))
    types = _jax.discharge_refs(traced.jaxpr).out_avals  # as `jax.jit`: a `jax.new_ref(0.)` is weak
    # What the user's function calls its arguments; values that it closes over come before them.
    known, count = traced.jaxpr.jaxpr.debug_info.arg_names or (), len(original.jaxpr.invars)
    names = ["" if name is None else str(name) for name in known][-count:]
    names = [""] * (count - len(names)) + names
    kept = (traced.fun_name, tuple(names), tuple(_jax.closed_over(traced)), tuple(types))
    history.add("flatten", original.jaxpr)
    # One device gains nothing by normal forms, unless its bits have to be those of many.
    passes = PASSES if order.count > 1 or variant.passes else ()
    flat = history.run((*passes, *variant.passes), original)
    return Captured(flat, original, *kept, variant)
