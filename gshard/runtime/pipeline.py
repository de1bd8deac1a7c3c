"""The stages of a lowering, from a traced function to a program that XLA compiles.

Every stage takes what the one before returned; `Lowered.dump` writes the result of each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh

from gshard import _jax
from gshard.capture.placement import DeviceOrder
from gshard.capture.stage import Captured, capture
from gshard.graph.history import History
from gshard.moving.costs import MACHINE, planning_for
from gshard.moving.seen import Seen
from gshard.planning.improve import final_passes, improve, passes
from gshard.planning.plan import plan_note
from gshard.planning.planner import partition
from gshard.propagation.inside import resolved
from gshard.propagation.stage import Known, shard
from gshard.rules.fixed_products import COMPILER_OPTIONS
from gshard.runtime.arrange import Arrangement, arrange
from gshard.runtime.options import Options
from gshard.runtime.program import Program, XlaSettings
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
    history = History()
    captured = capture(traced, order, options.reproducible, history)
    flat = captured.flat
    arguments = zip(flat.jaxpr.invars, given, strict=True)
    fixed = {v: s for v, s in arguments if s is not None}
    known = Known(order.count, options.memory_limit, fixed, resolved(flat, options.inside))
    lowering = Lowering(captured, known, order, mesh, options)
    arranged = lowering.plan(flat, history)
    with lowering.planning():
        finished = improve(arranged.plan.jaxpr, final_passes(options.overlap), history)
    if options.reproducible:
        settings = settings.with_options(COMPILER_OPTIONS)
    wide = bool(jax.config.jax_enable_x64)
    return Program(captured, settings, arranged, finished, history, lowering.plan, wide)


@dataclass(frozen=True, eq=False)
class Lowering:
    """What plans of a function are made from, beside its flat program or a variant of that."""

    captured: Captured
    known: Known
    order: DeviceOrder
    mesh: Mesh | None
    options: Options

    def plan(self, flat: ClosedJaxpr, history: History | None = None) -> Arrangement:
        """The plan of a flat program, improved."""
        history, options = history or History(), self.options
        with self.planning():
            flat, found = shard(flat, self.known, options.reproducible, history)
            seen = Seen()
            local = partition(flat.jaxpr, found, options.memory_limit, options.strict, seen)
            arranged = arrange(local, flat, found, self.captured, self.order, self.mesh, seen)
            history.add("plan", arranged.plan.jaxpr, plan_note)
            jaxpr = improve(arranged.plan.jaxpr, passes(options.overlap), history)
            return replace(arranged, plan=replace(arranged.plan, jaxpr=jaxpr))

    @contextlib.contextmanager
    def planning(self) -> Iterator[None]:
        """A context with the costs of the hardware, and without the user's mesh."""
        hardware = self.options.hardware
        machine = hardware.machine_for(self.order.count) if hardware else MACHINE
        machine = replace(machine, rings=True) if _has_rings(self.order) else machine
        with _jax.without_mesh(), planning_for(machine):
            yield


def _has_rings(order: DeviceOrder) -> bool:
    """Whether collectives between the devices are rings (Gloo)."""
    if isinstance(order.devices, int):
        return False
    gloo = jax.config.jax_cpu_collectives_implementation == "gloo"
    several = len({d.process_index for d in order.devices}) > 1
    return gloo and several and order.devices[0].platform == "cpu"
