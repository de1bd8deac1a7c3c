"""A per-device program as the operators that a compiler makes of it."""

from __future__ import annotations

import functools
from fractions import Fraction

from jax.extend.core import Jaxpr
from jax.extend.core.primitives import scan_p

from gshard.forecast.compilers import COMPILERS, Dataflow, fused
from gshard.forecast.dataflow import Body, LoopBodies, inlined
from gshard.forecast.work import product_work
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
        eqn = operator.root.eqn
        if operator.root.primitive not in LOOPS:
            continue
        times, inner = trips(eqn), [body_of(body, compiler, devices) for body in bodies(eqn)]
        scan = counts_of(eqn) if eqn.primitive is scan_p else None
        runs = own = [Fraction(times)] * len(inner)
        if ticks := Ticks.of(eqn):
            slowest = ticks.slowest([product_work(body) for body in inner])
            runs, own = ([Fraction(n, ticks.runs) for n in part] for part in (slowest, ticks.own))
        copies = chosen.stacking(eqn, inner[0]) if scan else []
        operator.loop = LoopBodies(inner, runs, own, scan, copies)
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    return Body(jaxpr, inputs, outputs, operators, flow.alias, flow.folded)
