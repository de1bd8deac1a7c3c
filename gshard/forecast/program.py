"""A per-device program as the operators that a compiler makes of it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from fractions import Fraction

from jax.extend.core import Jaxpr, JaxprEqn
from jax.extend.core.primitives import scan_p

from gshard.forecast.compilers import COMPILERS, fused
from gshard.forecast.dataflow import Body, Dataflow, LoopBodies, Walked, inlined
from gshard.forecast.work import multiplies, product_flops
from gshard.graph.regions import LOOPS, bodies, counts_of
from gshard.graph.source import Ticks, trips


@functools.lru_cache(maxsize=512)
def body_of(jaxpr: Jaxpr, compiler: str, devices: int = 1) -> Body:
    """What a compiler makes of a program, and of the bodies inside it.

    For an unpartitioned program, the most fusion possible on one of `devices`.
    """
    chosen = COMPILERS[compiler]
    ops, outputs = chosen.prepare(*inlined(jaxpr), devices)
    flow = Dataflow(ops, outputs, chosen.folds)
    operators = fused(flow, chosen)
    for operator in operators:
        if operator.root.primitive in LOOPS:
            operator.loop = _loop(operator.root.eqn, compiler, devices)
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    return Body(jaxpr, inputs, outputs, operators, flow.alias, flow.folded)


def _loop(eqn: JaxprEqn, compiler: str, devices: int) -> LoopBodies:
    """The bodies of a loop or branch."""
    times, jaxprs = trips(eqn), bodies(eqn)
    scan = counts_of(eqn) if eqn.primitive is scan_p else None
    inner = [body_of(body, compiler, devices) for body in jaxprs]
    runs = own = [Fraction(times)] * len(inner)
    if ticks := Ticks.of(eqn):
        slowest = ticks.slowest([_work(body) for body in inner])
        runs, own = ([Fraction(n, ticks.runs) for n in part] for part in (slowest, ticks.own))
    copies = COMPILERS[compiler].stacking(eqn, inner[0]) if scan else []
    return LoopBodies(inner, runs, own, scan, copies)


def _work(body: Body) -> float:
    """The operations of a body's products."""
    walked = ((count, op) for each, count, _ in body.walk() for op in each.members)
    return sum(count * product_flops(op) for count, op in walked if multiplies(op))


def walk(jaxpr: Jaxpr, compiler: str, devices: int = 1) -> Iterator[Walked]:
    """Every operator with its number of runs and its enclosing loops."""
    return body_of(jaxpr, compiler, devices).walk()
