"""Which schedule, and how many layers at each position: by the forecast of a layer's passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr

from gshard.forecast import Hardware, forecast
from gshard.graph.readable import size
from gshard.pipelining.meaning import Pipe
from gshard.pipelining.passes import Passes, floats
from gshard.pipelining.schedules import NAMES, Schedule, Seconds, make
from gshard.tensors.tile import byte_size


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
        kept, weights = held(kept[len(floats(inputs)) :]), held(fixed[counts[0] :])
        rate = machine.memory_bandwidth * machine.efficiency.memory
        slow, row = 2 * kept / rate, weights / rate  # in and out of slots; of a layer's weights
        ahead, behind, late = ahead + 2 * row, behind + 2 * row, late + 3 * row  # taken, or added
        times = (0.0, ahead, behind + slow, late + slow, seconds(head), behind + late)
        return Costs(
            times, held(inputs), held(saved), kept, weights, machine.sent_per_second,
            machine.cost_model.latency,
        )  # fmt: skip

    def step_seconds(self, pipe: Pipe) -> float:
        """A step: every tick, then the messages.

        Weights of chunks that are not neighbours are moved to their stages, and gradients back.
        """
        schedule, rows = pipe.schedule, max(pipe.layers) * pipe.schedule.chunks
        handed = schedule.ticks * (self.message + self.latency)
        moved = 2 * (schedule.chunks > 1) * self.weights * rows
        sent = rows * self.reduced + (handed + moved if schedule.stages > 1 else 0)
        return pipe.routes.step_seconds + sent / self.rate

    def rank(self, pipe: Pipe, limit: float) -> tuple[float, float, int]:
        """What is least for the best pipeline: memory over the limit, time, memory."""
        need, seconds = self.memory(pipe), self.step_seconds(pipe)
        return max(need, limit), float(f"{seconds:.6g}"), need

    def memory(self, pipe: Pipe) -> int:
        """The bytes of weights, their gradients, and all that waits in slots."""
        (messages, residuals, pending), schedule = pipe.routes.slots, pipe.schedule
        waiting = residuals * self.saved + pending * self.kept
        rows = 2 * self.weights * schedule.chunks
        batch = (messages + schedule.microbatches) * self.message
        return max(pipe.layers) * (waiting + rows) + batch


def balanced(layers: int, schedule: Schedule, costs: Costs) -> Pipe:
    """The pipeline of a schedule: every position has a layer, the last has the head as well.

    Equal numbers, where others gain nothing: rows of the weights are then where they are needed.
    """
    others, found = len(schedule.positions) - 1, list[tuple[int, ...]]()
    for last in range(-(-layers // (others + 1)) if others else 0, 0, -1):
        even, more = divmod(layers - last, others)
        if even:
            found.append((*(even + (n < more) for n in range(others)), last))
    pipes = (Pipe(schedule, counts, costs.seconds) for counts in found or [(layers,)])
    return min(pipes, key=costs.step_seconds)


def chosen(
    given: Schedule | None, stages: int, microbatches: int, layers: int, costs: Costs, limit: float
) -> Pipe:
    """The schedule that is given, or the fastest within the memory limit.

    Where nothing is within it, the one that needs the least. A given one that is over the limit is
    refused if another is within.
    """
    own = balanced(layers, given, costs) if given else None
    if own and costs.memory(own) <= limit:
        return own
    usable = (n for n in NAMES if n != "interleaved" or microbatches % stages == 0)
    made = (make(name, stages, microbatches) for name in usable)
    options = (balanced(layers, each, costs) for each in made if len(each.positions) <= layers)
    best = min(options, key=lambda pipe: costs.rank(pipe, limit))
    need = costs.memory(best)
    if own and need <= limit:
        refused = own.schedule
        raise ValueError(
            f"schedule={refused.schedule!r} has {refused.in_flight} microbatches in flight, which "
            f"take at least {size(costs.memory(own))} of a device's {size(limit)}; "
            f"{best.schedule.schedule!r} takes {size(need)}"
        )
    return own or best
