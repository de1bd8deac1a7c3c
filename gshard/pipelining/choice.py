"""Which schedule, and how many layers at each position: by the forecast of a layer's passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr

from gshard.forecast import Hardware, forecast
from gshard.graph.readable import size
from gshard.pipelining.passes import Passes, floats
from gshard.pipelining.schedules import NAMES, Schedule, Seconds, make, route
from gshard.tensors.tile import byte_size

Option = tuple[Schedule, tuple[int, ...]]  # with layers by position


@dataclass(frozen=True)
class Costs:
    """The costs of a layer and microbatch on a device of a stage, if these share all work."""

    seconds: Seconds  # that of the head is with its gradient
    message: int  # bytes of a microbatch, of what F keeps for B, of what B keeps for W, of weights
    saved: int
    kept: int
    weights: int
    rate: float  # bytes that a device sends in a second
    latency: float = 0.0  # bytes that it could send until a message begins
    reduced: int = 0  # bytes of a layer's gradients that are sent to sum them within a stage

    @staticmethod
    def of(layer: Passes, head: ClosedJaxpr | None, counts: Sequence[int], machine: Hardware,
           devices: int) -> Costs:  # fmt: skip
        """By the forecast of the passes, whose operands are `counts` closures and weights."""

        def seconds(program: ClosedJaxpr | None) -> float:
            found = forecast(program.jaxpr, 1, machine).operators if program else ()
            return float(sum(each.total_seconds for each in found)) / devices

        def held(avals: Sequence[Any]) -> int:
            return sum(byte_size(a.shape, a.dtype) for a in avals) // devices

        inputs, fixed = layer.forward.in_avals[sum(counts) :], layer.forward.in_avals[: sum(counts)]
        ahead, behind, late = map(seconds, (layer.forward, layer.backward, layer.weights))
        saved, kept = layer.forward.out_avals[len(inputs) :], layer.backward.out_avals
        kept = held(kept[len(floats(inputs)) :])
        slow = 2 * kept / (machine.memory_bandwidth * machine.efficiency.memory)  # into slots
        times = (0.0, ahead, behind + slow, late + slow, seconds(head), behind + late)
        return Costs(
            times, held(inputs), held(saved), kept, held(fixed[counts[0] :]),
            machine.sent_per_second, machine.cost_model.latency,
        )  # fmt: skip

    def step_seconds(self, schedule: Schedule, layers: tuple[int, ...]) -> float:
        """A step: every tick, then the messages.

        Weights of chunks that are not neighbours are moved to their stages, and gradients back.
        """
        rows = max(layers) * schedule.chunks
        handed = schedule.ticks * (self.message + self.latency)
        moved = 2 * (schedule.chunks > 1) * self.weights * rows
        sent = rows * self.reduced + (handed + moved if schedule.stages > 1 else 0)
        return route(schedule, layers, self.seconds).step_seconds + sent / self.rate

    def rank(self, option: Option, limit: float) -> tuple[float, float, int]:
        """What is least for the best option: memory over the limit, time, memory."""
        need, seconds = self.memory(*option), self.step_seconds(*option)
        return max(need, limit), float(f"{seconds:.6g}"), need

    def memory(self, schedule: Schedule, layers: tuple[int, ...]) -> int:
        """The bytes of weights, their gradients, and all that waits in slots."""
        messages, residuals, pending = route(schedule, layers, self.seconds).slots
        waiting = residuals * self.saved + pending * self.kept
        rows = 2 * self.weights * schedule.chunks
        return max(layers) * (waiting + rows) + (messages + schedule.microbatches) * self.message


def balanced(layers: int, schedule: Schedule, costs: Costs) -> tuple[int, ...]:
    """How many layers each position has, at least one; the last has the head as well.

    Equal numbers, where others gain nothing: rows of the weights are then where they are needed.
    """
    others = len(schedule.positions) - 1
    if not others:
        return (layers,)
    found = []
    for last in range(-(-layers // (others + 1)), 0, -1):
        even, more = divmod(layers - last, others)
        if even:
            found.append((*(even + (n < more) for n in range(others)), last))
    return min(found, key=lambda counts: costs.step_seconds(schedule, counts))


def chosen(
    given: Schedule | None, stages: int, microbatches: int, layers: int, costs: Costs, limit: float
) -> Option:
    """The schedule that is given, or the fastest within the memory limit; layers by position.

    Where nothing is within it, the one that needs the least. A given one that is over the limit is
    refused if another is within.
    """
    own = (given, balanced(layers, given, costs)) if given else None
    if own and costs.memory(*own) <= limit:
        return own
    usable = (n for n in NAMES if n != "interleaved" or microbatches % stages == 0)
    made = (make(name, stages, microbatches) for name in usable)
    fitting = (each for each in made if len(each.positions) <= layers)
    options = [(each, balanced(layers, each, costs)) for each in fitting]
    best = min(options, key=lambda option: costs.rank(option, limit))
    need = costs.memory(*best)
    if own and need <= limit:
        raise ValueError(
            f"schedule={own[0].name!r} has {own[0].in_flight} microbatches in flight, which take "
            f"at least {size(costs.memory(*own))} of a device's {size(limit)}; "
            f"{best[0].name!r} takes {size(need)}"
        )
    return own or best
