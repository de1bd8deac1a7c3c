"""The first stage of a lowering: from a traced function to one flat program in normal form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from gshard import _jax
from gshard.capture.flatten import argument_names, inline
from gshard.capture.placement import DeviceOrder
from gshard.capture.simplify import PASSES, simplify
from gshard.capture.simplify.fixed_order import fix_order
from gshard.graph.history import History


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


def capture(
    traced: jax.stages.Traced, order: DeviceOrder, reproducible: bool, history: History
) -> Captured:
    """The flat program of a traced function: calls inlined, logical shapes, normal forms."""
    original = inline(traced.jaxpr, order)
    names = argument_names(traced.jaxpr, len(original.jaxpr.invars))
    kept = (traced.fun_name, names, tuple(_jax.closed_over(traced)), tuple(traced.jaxpr.out_avals))
    history.add("flatten", original.jaxpr)
    flat = original
    # One device gains nothing by normal forms, but its bits have to be those of many.
    for normal_form in PASSES if order.count > 1 or reproducible else ():
        flat = simplify(flat, normal_form)
        history.add(normal_form.__name__, flat.jaxpr)
    if reproducible:
        flat = fix_order(flat)
        history.add("fix_order", flat.jaxpr)
    return Captured(flat, original, *kept)
