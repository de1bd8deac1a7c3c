"""The stages of a lowering, from a traced function to a program that XLA compiles.

Every stage takes what the one before returned; `Lowered.dump` writes the result of each.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh

from gshard import _jax
from gshard.capture.inside import resolved
from gshard.capture.placement import DeviceOrder
from gshard.capture.stage import capture
from gshard.graph.history import History
from gshard.graph.regions import walk
from gshard.moving.available import Seen
from gshard.moving.collectives import CollectivePermute
from gshard.moving.costs import GENERIC_COSTS, use_cost_model
from gshard.planning.improve import FINAL_PASSES, PASSES
from gshard.planning.plan import Plan, plan_note
from gshard.planning.planner import Planner
from gshard.propagation.stage import Known, shard
from gshard.runtime.options import Options
from gshard.runtime.ports import Arrangement, arrange
from gshard.runtime.program import Program, XlaSettings
from gshard.tensors.devices import Place
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import Tile

_FREEZING = threading.Lock()
_FROZEN = threading.Event()  # by the user, which stay so: to count them takes long
_YOUNG = 50_000  # new objects before the garbage collector looks at them, some megabytes


def lower(
    traced: jax.stages.Traced,
    given: Sequence[Sharding | None],
    order: DeviceOrder,
    mesh: Mesh | None,
    settings: XlaSettings,
    options: Options,
) -> Program:
    """One traced function, whose arguments have the shardings `given`, as a per-device program."""
    history, limit = History(), options.memory_limit // options.shrunk**2
    captured = capture(traced, order, options.variant, history)
    flat = captured.flat
    inside = resolved(captured.places, options.inside) if options.inside else {}
    known = Known(order.count, limit, given, inside)

    def planned(flat: ClosedJaxpr, history: History) -> Arrangement:
        """The plan of the flat program, or of a variant of it."""
        with _planning(options, order):
            flat, found = shard(flat, known, options.variant.rewrites, history)
            seen = Seen()

            def local(place: Place, tiles: Sequence[Tile]) -> list[Tile]:
                planner = Planner(place, found, limit, options.strict, seen=seen)
                return planner.run(flat.jaxpr, tiles)

            arranged = arrange(local, flat, found, captured, order, mesh, seen)
            history.add("plan", arranged.plan.jaxpr, plan_note)
            improved = history.run(PASSES, arranged.plan.jaxpr, plan_note)
            return replace(arranged, plan=Plan(improved, order.count))

    arranged = planned(flat, history)
    with _planning(options, order):
        finished = history.run(FINAL_PASSES, arranged.plan.jaxpr, plan_note)
    settings = settings.with_options(options.variant.compiler_options)
    nodes = (eqn.params.get("node") for eqn in walk(finished))
    pairs = (frozenset(map(frozenset, n.groups)) for n in nodes if isinstance(n, CollectivePermute))
    if options.target(order.devices) == "gpu" and len(set(pairs)) == 1 and _is_option(_CHAINS):
        settings = settings.with_options({_CHAINS: True})
    wide = bool(jax.config.jax_enable_x64)
    return Program(captured, settings, arranged, finished, history, planned, wide)


# Permutes between neighbours are otherwise ten times slower on GPUs. But XLA may wait for ever if
# some permutes are between other devices than the rest (xla 44530).
_CHAINS = "xla_gpu_collective_permute_connected_components"


@functools.cache
def _is_option(name: str) -> bool:
    """Whether this release of XLA has a flag."""
    try:
        jax.jit(lambda: 0, compiler_options={name: True}).lower().compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


@contextlib.contextmanager
def _planning(options: Options, order: DeviceOrder) -> Iterator[None]:
    """A context with the costs of the hardware, and without the user's mesh.

    For smaller sizes, latency and work per byte are smaller to the same degree.
    """
    costs = options.hardware.cost_model if options.hardware else GENERIC_COSTS
    latency, work = costs.latency / options.shrunk**2, costs.flops_per_byte / options.shrunk
    rings = costs.rings or _has_rings(order)
    costs = replace(costs, latency=latency, flops_per_byte=work, rings=rings)
    with _jax.without_mesh(), use_cost_model(costs):
        yield


def _has_rings(order: DeviceOrder) -> bool:
    """Whether collectives between the devices are rings (Gloo)."""
    devices = () if isinstance(order.devices, int) else order.devices
    gloo = jax.config.jax_cpu_collectives_implementation == "gloo"
    several = len({d.process_index for d in devices}) > 1
    return gloo and several and devices[0].platform == "cpu"


@contextlib.contextmanager
def collecting_new_objects_alone() -> Iterator[None]:
    """The garbage collector leaves out the objects that were there before, as during a lowering.

    It makes many, nearly all of which stay: the collector would look at all objects repeatedly.
    """
    if not _FREEZING.acquire(blocking=False):  # a lowering around this one, or another thread's
        yield
        return
    young, *older = gc.get_threshold()
    with contextlib.ExitStack() as after:
        after.callback(_FREEZING.release)
        if not _FROZEN.is_set() and gc.get_freeze_count():
            _FROZEN.set()
        elif not _FROZEN.is_set():
            gc.freeze()
            after.callback(gc.unfreeze)
        gc.set_threshold(young and max(young, _YOUNG), *older)  # 0: the user has turned it off
        after.callback(gc.set_threshold, young, *older)
        yield
