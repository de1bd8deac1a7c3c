"""The passes of a layer: forward, backward for its input, and backward for its weights.

JAX differentiates the layer once. The program is cut by dependencies: what does not depend on the
gradient of the output is the forward pass, what the gradient of the input needs comes next, and the
other products when there is time. What is cheap comes before them, so that their operands alone are
kept. No product is computed twice, and what `jax.checkpoint` says of residuals holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, jaxpr_as_fun
from jax.extend.core import primitives as p

from gshard._jax import drop_unused
from gshard.graph.evaluate import bind, evaluate, rebuilt
from gshard.graph.graph import inputs_of, live, needed_for
from gshard.graph.kinds import PRODUCTS
from gshard.graph.regions import bodies, called
from gshard.graph.source import on_behalf_of
from gshard.tensors.tile import byte_size


def is_float(value: Any) -> bool:
    """Whether it has a gradient."""
    return bool(jnp.issubdtype(value.dtype, jnp.inexact))


def floats(values: Iterable[Any]) -> list[Any]:
    """The values that have gradients."""
    return [value for value in values if is_float(value)]


class Passes(NamedTuple):
    """A layer's passes. `fixed` operands are shared by all microbatches: closures and weights.

    forward: fixed, input -> output, residuals. backward: fixed, residuals, gradient of the output
    -> gradient of the input, what the weights' pass needs. weights: fixed, that -> their gradients.
    """

    forward: ClosedJaxpr
    backward: ClosedJaxpr
    weights: ClosedJaxpr


def differentiated(block: ClosedJaxpr, fixed: int) -> Passes:
    """The passes of `block`, whose first `fixed` operands are shared by all microbatches."""
    operands, waiting = len(block.in_avals), len(floats(block.in_avals[:fixed]))
    whole = with_gradients(block, operands)
    early = _apart(whole.jaxpr.eqns, whole.jaxpr.invars[operands:])
    forward, rest = _cut(whole, fixed, operands, len(block.out_avals), early)
    rest = inlined(rest)
    jaxpr, gradients = rest.jaxpr, rest.jaxpr.outvars
    needed = set(map(id, needed_for(gradients[waiting:], jaxpr.eqns)))
    late = (e for e in jaxpr.eqns if id(e) not in needed and (e.primitive in PRODUCTS or bodies(e)))
    first = _apart(jaxpr.eqns, [v for eqn in late for v in eqn.outvars])
    rest = _program(rest, jaxpr.invars, gradients[waiting:] + gradients[:waiting], jaxpr.eqns)
    parts = _cut(rest, fixed, len(jaxpr.invars), len(gradients) - waiting, first)
    return Passes(forward, *parts)


def lifted(program: ClosedJaxpr, masks: bool = False) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    """What a program computes of no operand, such as a mask, and the rest, which takes it first.

    Nothing larger than half of the largest value that the program makes, and no broadcasts, which
    are larger than what they read: of `masks` alone. Inside of XLA's softmax they double its time.
    """
    eqns, first, ready = program.jaxpr.eqns, list[JaxprEqn](), set[Any]()
    bytes_of = {v: byte_size(v.aval.shape, v.aval.dtype) for eqn in eqns for v in eqn.outvars}
    most = max(bytes_of.values(), default=0)
    stay = [v for eqn in eqns if eqn.effects for v in eqn.outvars]
    for eqn in _apart(eqns, [*program.jaxpr.invars, *stay]):
        is_wide = eqn.primitive in (p.broadcast_in_dim_p, p.iota_p)
        is_small = all(v.aval.shape and 2 * bytes_of[v] <= most for v in eqn.outvars)
        if is_small and (not is_wide or (masks and ready.intersection(inputs_of([eqn])))):
            first.append(eqn)
            ready.update(eqn.outvars)
    return _cut(program, 0, 0, 0, first, live)


def _cut(
    whole: ClosedJaxpr, fixed: int, end: int, goals: int, first: Iterable[JaxprEqn],
    needed: Callable[..., list[JaxprEqn]] = lambda eqns, wanted: needed_for(wanted, eqns),
) -> tuple[ClosedJaxpr, ClosedJaxpr]:  # fmt: skip
    """Two programs: the first `goals` results, by the equations `first`, and the other results.

    The first has the operands before `end`. It also returns what the second needs of what varies;
    what depends on `fixed` operands alone is computed in both.
    """
    jaxpr = whole.jaxpr
    ready = {*jaxpr.invars[:end], *(v for eqn in first for v in eqn.outvars)}
    if end:  # otherwise what does not vary is taken, without effects
        ready &= _reached(jaxpr.eqns, jaxpr.invars[fixed:])
    wanted = jaxpr.outvars[goals:]
    eqns = needed([eqn for eqn in jaxpr.eqns if not ready.issuperset(eqn.outvars)], wanted)
    read = [*inputs_of(eqns), *(v for v in wanted if not isinstance(v, Literal))]
    kept = [v for v in dict.fromkeys(read) if v in ready]
    early = jaxpr.eqns if end else needed_for(kept, jaxpr.eqns)
    before = _program(whole, jaxpr.invars[:end], [*jaxpr.outvars[:goals], *kept], early)
    given = [*jaxpr.invars[:fixed], *kept, *jaxpr.invars[end:]]
    return before, _program(whole, given, wanted, eqns, bool(end))


def with_gradients(program: ClosedJaxpr, operands: int) -> ClosedJaxpr:
    """The results, and the gradients of the first `operands`, which are floats.

    Its operands are followed by cotangents of the results that are floats.
    """
    run, types = jaxpr_as_fun(program), structs(program.in_avals)

    def both(*args: Any) -> list[Any]:
        given, cotangents = args[: len(types)], args[len(types) :]

        def of_floats(*varying: Any) -> tuple[list[Any], list[Any]]:
            left = iter(varying)
            own = [next(left) if is_float(a) else a for a in given[:operands]]
            results = run(*own, *given[operands:])
            return floats(results), results

        _, vjp, results = jax.vjp(of_floats, *floats(given[:operands]), has_aux=True)
        return [*results, *vjp(list(cotangents))]

    return jax.make_jaxpr(both)(*types, *floats(structs(program.out_avals)))


def structs(avals: Iterable[Any]) -> list[jax.ShapeDtypeStruct]:
    """Types without shardings."""
    return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]


def inlined(program: ClosedJaxpr) -> ClosedJaxpr:
    """A program in which no calls are left."""

    def interpret(eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        with on_behalf_of(eqn):
            body = called(eqn)
            return bind(eqn, values) if body is None else evaluate(body, values, interpret)

    return cast("ClosedJaxpr", rebuilt(program, interpret))


def _program(
    like: ClosedJaxpr, operands: Sequence[Any], results: Sequence[Any], eqns: Sequence[JaxprEqn],
    pruned: bool = True,
) -> ClosedJaxpr:  # fmt: skip
    """A program of some of the equations of another; `pruned`, it calls nothing on the host."""
    unnamed = like.jaxpr.debug_info.with_unknown_names()
    parts = {"invars": list(operands), "outvars": list(results), "eqns": list(eqns)}
    jaxpr = like.jaxpr.replace(**parts, debug_info=unnamed)
    return like.replace(jaxpr=drop_unused(jaxpr) if pruned else jaxpr)


def _reached(eqns: Sequence[JaxprEqn], start: Iterable[Any]) -> set[Any]:
    """Some variables, and those that depend on them."""
    found = set(start)
    for eqn in eqns:
        if any(not isinstance(a, Literal) and a in found for a in eqn.invars):
            found.update(eqn.outvars)
    return found


def _apart(eqns: Sequence[JaxprEqn], start: Iterable[Any]) -> list[JaxprEqn]:
    """The equations that make none of some variables, and do not depend on them."""
    late = _reached(eqns, start)
    return [eqn for eqn in eqns if not late.intersection(eqn.outvars)]
