"""The stages of a lowering, from a traced function to a program that XLA compiles.

Every stage takes a program and returns one; `Lowered.dump` writes the result of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh

from gshard import _jax
from gshard.capture.flatten import argument_names, inline
from gshard.capture.placement import DeviceOrder
from gshard.capture.simplify import PASSES as NORMAL_FORMS
from gshard.capture.simplify import simplify
from gshard.capture.simplify.fixed_order import fix_order
from gshard.graph.history import History
from gshard.moving.costs import MACHINE, planning_for
from gshard.moving.seen import Seen
from gshard.planning.improve import passes
from gshard.planning.plan import Plan
from gshard.planning.planner import partition
from gshard.propagation.inside import resolved
from gshard.propagation.propagate import propagate
from gshard.propagation.rewrites.exchange_by_expert import exchange_by_expert
from gshard.propagation.rewrites.ring_attention import ring_attention
from gshard.rules.fixed_order import pinning
from gshard.rules.fixed_products import COMPILER_OPTIONS
from gshard.runtime.arrange import Arrangement, arrange
from gshard.runtime.options import Options
from gshard.runtime.program import Program, XlaSettings, finish
from gshard.tensors.sharding import Sharding

Rewrite = Callable[[ClosedJaxpr, Mapping[Any, Sharding], int], ClosedJaxpr]

# Rewrites that depend on shardings; the dump says why one was not applied.
REWRITES: dict[str, tuple[Rewrite, str]] = {
    "exchange by expert": (
        lambda flat, shardings, limit: exchange_by_expert(flat, shardings),
        "not applied: no ragged product has its groups split",
    ),
    "ring attention": (
        ring_attention,
        "not applied: no keys, and no scores of a device's queries, exceed the memory limit",
    ),
}


def lower(
    traced: jax.stages.Traced,
    given: Sequence[Sharding | None],
    order: DeviceOrder,
    mesh: Mesh | None,
    settings: XlaSettings,
    options: Options,
) -> Program:
    """One traced function, whose arguments have the shardings `given`, as a per-device program."""
    history = History()
    flat = original = inline(traced.jaxpr, order)  # calls inlined, logical shapes
    history.add("flatten", flat.jaxpr)
    reproducible = options.reproducible
    # One device gains nothing by normal forms, but its bits have to be those of many.
    for normal_form in NORMAL_FORMS if order.count > 1 or reproducible else ():
        flat = simplify(flat, normal_form)
        history.add(normal_form.__name__, flat.jaxpr)
    if reproducible:
        flat = fix_order(flat)
        settings = settings.with_options(COMPILER_OPTIONS)
        history.add("fix_order", flat.jaxpr)
    fixed = {v: s for v, s in zip(flat.jaxpr.invars, given, strict=True) if s is not None}
    inside = resolved(flat, options.inside)
    # All that is needed of `traced` from here on.
    name, closed_over, types = traced.fun_name, _jax.closed_over(traced), traced.jaxpr.out_avals
    names = argument_names(traced.jaxpr, len(flat.jaxpr.invars))
    machine = options.hardware.machine_for(order.count) if options.hardware else MACHINE
    improvements = passes(False if reproducible else options.overlap)
    limit = options.memory_limit

    def planned(flat: ClosedJaxpr, history: History) -> Arrangement:
        with _jax.without_mesh(), planning_for(machine):
            found = propagate(flat, order.count, fixed, limit, inside)  # a sharding for every value
            history.add("propagate", flat.jaxpr, found.note)
            for title, (rewrite, remark) in ({} if reproducible else REWRITES).items():
                rewritten = rewrite(flat, found.shardings, limit)
                if rewritten is not flat:  # these were of the program before the rewrite
                    flat = rewritten
                    found = propagate(flat, order.count, fixed, limit, inside)
                    remark = ""
                history.add(title, flat.jaxpr, found.note, remark)
            seen = Seen()
            local = partition(flat.jaxpr, found, limit, options.strict, seen)
            local = pinning(local) if reproducible else local
            # Plan, and improve the plan.
            built = arrange(local, flat, found, closed_over, order, mesh, types, history, seen)
            return built.improved(improvements, history)

    def variant(changed: ClosedJaxpr) -> Plan:
        return planned(changed, History()).plan

    # Emit, and combine small collectives. The user's mesh, if one is set, is not the program's.
    with _jax.without_mesh(), planning_for(machine):
        arranged = planned(flat, history)
        overlaps = options.overlap is True or (options.overlap == "auto" and machine.overlaps)
        hides = overlaps and not reproducible
        return finish(arranged, name, settings, history, variant, original, names, hides)
