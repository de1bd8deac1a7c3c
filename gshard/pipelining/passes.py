"""The passes of a layer: forward, backward for its input, and backward for its weights.

JAX differentiates the layer once. The program of its backward pass is cut by dependencies: what the
gradient of the input needs comes first, the rest when there is time. No product is computed twice,
and what `jax.checkpoint` says of residuals holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, jaxpr_as_fun

from gshard._jax import drop_unused
from gshard.graph.evaluate import bind, evaluate
from gshard.graph.regions import called
from gshard.graph.source import on_behalf_of


def is_float(value: Any) -> bool:
    """Whether it has a gradient."""
    return bool(jnp.issubdtype(value.dtype, jnp.inexact))


def floats(values: Iterable[Any]) -> list[Any]:
    """The values that have gradients."""
    return [value for value in values if is_float(value)]


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer's passes. `fixed` operands are shared by all microbatches: closures and weights.

    forward: fixed, input -> output, residuals. backward: fixed, residuals, gradient of the output
    -> gradient of the input, what the weights' pass needs. weights: fixed, that -> their gradients.
    """

    forward: ClosedJaxpr
    backward: ClosedJaxpr
    weights: ClosedJaxpr


def differentiated(block: ClosedJaxpr, fixed: int) -> Layer:
    """The passes of `block`, whose first `fixed` operands are shared by all microbatches."""
    structs, held = _structs(block.in_avals), list[Any]()
    run = jaxpr_as_fun(block)

    def forward(*args: Any) -> tuple[list[Any], list[Any]]:
        def of_floats(*varying: Any) -> tuple[list[Any], list[Any]]:
            given = iter(varying)
            results = run(*(next(given) if is_float(a) else a for a in args))
            return floats(results), results

        _, vjp, results = jax.vjp(of_floats, *floats(args), has_aux=True)
        leaves, tree = jax.tree.flatten(vjp)
        held.append(tree)
        return results, leaves

    traced = jax.make_jaxpr(forward)(*structs)
    outputs = len(block.out_avals)
    leaves = traced.jaxpr.outvars[outputs:]
    varying = _reached(traced.jaxpr.eqns, traced.jaxpr.invars[fixed:])
    saved = list(dict.fromkeys(v for v in leaves if not isinstance(v, Literal) and v in varying))
    ends = [*traced.jaxpr.outvars[:outputs], *saved]
    again = _only(traced, [v for v in leaves if isinstance(v, Literal) or v not in varying])

    def backward(*args: Any) -> list[Any]:
        constants, rest = args[:fixed], args[fixed:]
        known = dict(zip(saved, rest, strict=False))
        nothing = [None] * (len(structs) - fixed)
        other = iter(evaluate(again, [*constants, *nothing]))
        found = [
            known[v] if not isinstance(v, Literal) and v in known else next(other) for v in leaves
        ]
        return list(jax.tree.unflatten(held[0], found)(list(rest[len(saved) :])))

    gradients = floats(_structs(block.out_avals))
    whole = _traced(backward, [*structs[:fixed], *_structs(v.aval for v in saved), *gradients])
    parts = _cut(whole, fixed, len(floats(structs[:fixed])))
    return Layer(_only(traced, ends), *parts)


def _cut(whole: ClosedJaxpr, fixed: int, weights: int) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    """A backward pass, of which the first `weights` results can wait, in two parts.

    The first has the other results, and all that the second part needs of what varies.
    """
    jaxpr = whole.jaxpr
    first = _only(whole, jaxpr.outvars[weights:])
    made = {v for eqn in first.jaxpr.eqns for v in eqn.outvars}
    varying = _reached(jaxpr.eqns, jaxpr.invars[fixed:])
    ready = {v for v in varying if v in made or v in jaxpr.invars}
    makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    kept: dict[Any, None] = {}
    needed: dict[JaxprEqn, None] = {}
    waiting = [v for v in jaxpr.outvars[:weights] if not isinstance(v, Literal)]
    while waiting:
        var = waiting.pop()
        if var in ready:
            kept[var] = None
        elif var in makers and makers[var] not in needed:
            needed[makers[var]] = None
            waiting += [a for a in makers[var].invars if not isinstance(a, Literal)]
    before = _only(whole, [*jaxpr.outvars[weights:], *kept])
    later = jaxpr.replace(
        invars=[*jaxpr.invars[:fixed], *kept],
        outvars=jaxpr.outvars[:weights],
        eqns=[eqn for eqn in jaxpr.eqns if eqn in needed],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    return before, whole.replace(jaxpr=later)


def scored(head: ClosedJaxpr, fixed: int, inputs: int) -> ClosedJaxpr:
    """fixed, input, targets, cotangents -> scores, gradients of fixed operands, and of the input.

    `head` is a function of the first three that returns the scores.
    """
    run = jaxpr_as_fun(head)
    structs = _structs(head.in_avals)

    def score(*args: Any) -> list[Any]:
        operands, cotangents = args[: len(structs)], args[len(structs) :]

        def of_floats(*varying: Any) -> tuple[list[Any], list[Any]]:
            given = iter(varying)
            own = [next(given) if is_float(a) else a for a in operands[: fixed + inputs]]
            results = run(*own, *operands[fixed + inputs :])
            return floats(results), results

        own = floats(operands[: fixed + inputs])
        _, vjp, results = jax.vjp(of_floats, *own, has_aux=True)
        return [*results, *vjp(list(cotangents))]

    return _traced(score, [*structs, *floats(_structs(head.out_avals))])


def _structs(avals: Iterable[Any]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]


def _traced(run: Callable[..., Any], structs: Sequence[Any]) -> ClosedJaxpr:
    """The program of a function, in which no calls are left."""

    def inlined(eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        with on_behalf_of(eqn):
            body = called(eqn)
            return bind(eqn, values) if body is None else evaluate(body, values, inlined)

    program = jax.make_jaxpr(run)(*structs)
    return jax.make_jaxpr(lambda *args: evaluate(program, args, inlined))(*structs)


def _only(program: ClosedJaxpr, results: Sequence[Any]) -> ClosedJaxpr:
    """The program with these results alone."""
    unnamed = program.jaxpr.debug_info.with_unknown_names()
    jaxpr = program.jaxpr.replace(outvars=list(results), debug_info=unnamed)
    return program.replace(jaxpr=drop_unused(jaxpr))


def _reached(eqns: Iterable[JaxprEqn], start: Iterable[Any]) -> set[Any]:
    """The variables that depend on some."""
    found = set(start)
    for eqn in eqns:
        if any(not isinstance(a, Literal) and a in found for a in eqn.invars):
            found.update(eqn.outvars)
    return found
