"""The stages of a lowering, from a traced function to a program that XLA compiles.

Every stage takes what the one before returned; `Lowered.dump` writes the result of each.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh

from gshard import _jax
from gshard.capture.placement import DeviceOrder
from gshard.capture.stage import capture
from gshard.graph.history import History
from gshard.moving.costs import MACHINE, planning_for
from gshard.moving.seen import Seen
from gshard.planning.improve import improve, passes
from gshard.planning.plan import Plan
from gshard.planning.planner import partition
from gshard.propagation.inside import resolved
from gshard.propagation.stage import Known, shard
from gshard.rules.fixed_order import pinning
from gshard.rules.fixed_products import COMPILER_OPTIONS
from gshard.runtime.arrange import Arrangement, arrange
from gshard.runtime.options import Options
from gshard.runtime.program import Program, XlaSettings, finish
from gshard.tensors.sharding import Sharding


def lower(
    traced: jax.stages.Traced,
    given: Sequence[Sharding | None],
    order: DeviceOrder,
    mesh: Mesh | None,
    settings: XlaSettings,
    options: Options,
) -> Program:
    """One traced function, whose arguments have the shardings `given`, as a per-device program."""
    history, reproducible, limit = History(), options.reproducible, options.memory_limit
    captured = capture(traced, order, reproducible, history)
    flat = captured.flat
    settings = settings.with_options(COMPILER_OPTIONS) if reproducible else settings
    arguments = zip(flat.jaxpr.invars, given, strict=True)
    fixed = {v: s for v, s in arguments if s is not None}
    known = Known(order.count, limit, fixed, resolved(flat, options.inside))
    machine = options.hardware.machine_for(order.count) if options.hardware else MACHINE
    improvements = passes(False if reproducible else options.overlap)

    def planned(flat: ClosedJaxpr, history: History) -> Arrangement:
        with _jax.without_mesh(), planning_for(machine):
            flat, found = shard(flat, known, reproducible, history)
            seen = Seen()
            local = partition(flat.jaxpr, found, limit, options.strict, seen)
            local = pinning(local) if reproducible else local
            built = arrange(local, flat, found, captured, order, mesh, history, seen)
            return built.with_plan(improve(built.plan, improvements, seen, history))

    def variant(changed: ClosedJaxpr) -> Plan:
        return planned(changed, History()).plan

    # The user's mesh, if one is set, is not the program's.
    with _jax.without_mesh(), planning_for(machine):
        arranged = planned(flat, history)
        overlaps = options.overlap is True or (options.overlap == "auto" and machine.overlaps)
        hides = overlaps and not reproducible
        return finish(arranged, captured, settings, history, variant, hides)
