"""Primitives without a rule: they run on replicated operands, and the gathers are listed.

That is correct for every function of arrays, and slow for large ones: `gshard.register_rule`
registers a rule, and `gshard.jit(..., strict=True)` makes the primitive an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxprs_in_params

from gshard._jax import AbstractRef, allowed_in_branches, python_implementation
from gshard.graph.reason import Reason
from gshard.graph.source import on_behalf_of, source_of
from gshard.rules.base.rule import Context, Rule, Way
from gshard.rules.base.ways import replicated_way
from gshard.rules.callbacks import once_way, run_everywhere, run_once
from gshard.tensors.factors import no_factors
from gshard.tensors.manual import MANUAL
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import Tile


def unknown_rule(eqn: JaxprEqn, strict: bool) -> Rule:
    """The rule of a primitive without a registered rule."""
    name = eqn.primitive.name
    if strict:
        raise NotImplementedError(
            f"{source_of(eqn)}: gshard has no rule for the primitive {name!r}, and strict=True "
            "does not allow it to run replicated on every device; add one with gshard.register_rule"
            f"{_untraceable(eqn)}"
        )
    _check(eqn)
    ways = once_way if eqn.effects else replicated_way
    return Rule(no_factors, ways=ways, run=_run_replicated)


def implementation(eqn: JaxprEqn) -> ClosedJaxpr | Exception | None:
    """The program of the Python function that implements a primitive, if it has one.

    Where that cannot be traced, it is the error that it raised.
    """
    function = python_implementation(eqn.primitive)
    if function is None:
        return None
    try:
        return traced(eqn, lambda eqn, *args: function(*args, **eqn.params))
    except Exception as error:  # any error: it is the user's code
        return error


def traced(eqn: JaxprEqn, fn: Callable[..., Any]) -> ClosedJaxpr:
    """The program of `fn(eqn, *operands)`, attributed to the user's line."""
    avals = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in eqn.invars]
    with on_behalf_of(eqn):
        return jax.make_jaxpr(lambda *args: fn(eqn, *args))(*avals)


def _untraceable(eqn: JaxprEqn) -> str:
    """Why a primitive was not replaced by its implementation, to be added to a message."""
    error = None if eqn.effects else implementation(eqn)
    if not isinstance(error, Exception):
        return ""
    first = f"{type(error).__name__}: {error}".partition("\n")[0]
    return f" (its Python implementation cannot be traced: {first})"


def _check(eqn: JaxprEqn) -> None:
    """Only functions of arrays can run on every device, each by itself."""
    name = eqn.primitive.name
    avals = [a.aval for a in (*eqn.invars, *eqn.outvars)]
    strange = [a for a in avals if not isinstance(a, ShapedArray)]
    if any(isinstance(a, AbstractRef) for a in strange):
        raise NotImplementedError(
            f"{source_of(eqn)}: gshard cannot run {name!r} on a reference: it supports only reads "
            "and writes; read it first (ref[...]), and write the result back"
        )
    if strange:
        raise NotImplementedError(
            f"{source_of(eqn)}: gshard cannot run the primitive {name!r}: it takes or returns "
            f"{strange[0]}, which is not an array and cannot be copied to every device; keep it "
            f"out of gshard.jit, or give the primitive a rule with gshard.register_rule"
            f"{_untraceable(eqn)}"
        )
    if eqn.effects and not allowed_in_branches(eqn.effects):
        raise NotImplementedError(
            f"{source_of(eqn)}: gshard cannot run the primitive {name!r}: it has the effects "
            f"{set(eqn.effects)}, which are not supported in a partitioned program; keep "
            "it out of gshard.jit, or give the primitive a rule with gshard.register_rule"
        )
    if any(map(_is_manual, jaxprs_in_params(eqn.params))):
        raise NotImplementedError(
            f"{source_of(eqn)}: the primitive {name!r} has no rule, so it runs unchanged, but "
            "there is a manual region inside it; put the region around it instead"
        )


def _is_manual(jaxpr: Jaxpr) -> bool:
    """Whether a manual region begins, ends or communicates in a program."""
    return any(
        eqn.primitive in MANUAL or any(map(_is_manual, jaxprs_in_params(eqn.params)))
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns
    )


def _run_replicated(
    ctx: Context, eqn: JaxprEqn, way: Way, tiles: list[Tile], targets: list[Sharding]
) -> list[Tile]:
    where = "on the first device" if eqn.effects else "replicated on every device"
    why = f"{eqn.primitive.name} has no rule and runs {where}; gshard.register_rule adds one"
    why += _untraceable(eqn)
    run = run_once if eqn.effects else run_everywhere
    return run(ctx, eqn, tiles, Reason("step", "", why))
