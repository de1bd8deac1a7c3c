"""The forecast of one program: its time and memory, summed by any key."""

from __future__ import annotations

import functools
import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.extend.core import Jaxpr

from gshard.forecast.collective import Topology
from gshard.forecast.compilers import COMPILERS
from gshard.forecast.hardware import Hardware, hardware, present
from gshard.forecast.memory import Memory, memory_of
from gshard.forecast.program import body_of
from gshard.forecast.time import Timed, timed
from gshard.graph.readable import duration, size
from gshard.graph.readable import table as notebook_table

GENERIC = "generic accelerators"  # what plans are made for if the devices are CPUs
OUTSIDE = "outside the program"  # the part of a step that feeds it and fetches its results


def forecast(
    jaxpr: Jaxpr,
    devices: int,
    machine: str | Path | Hardware | None = None,
    topology: Topology | None = None,
    donated: Sequence[int] = (),
) -> Forecast:
    """The forecast of a per-device program on `devices` devices, by default those of JAX."""
    chosen = present() if machine is None else hardware(machine)
    joined = chosen.topology(devices) if topology is None else topology
    if joined.devices < devices:
        raise ValueError(
            f"the program is for {devices} devices, but the topology {joined.name} joins "
            f"{joined.devices}; leave `topology` out for one that fits"
        )
    body = body_of(jaxpr, chosen.compiler)
    memory = memory_of(body, COMPILERS[chosen.compiler], donated, chosen.efficiency.slack)
    return Forecast(chosen, joined, devices, tuple(timed(body, chosen, joined)), memory)


@dataclass(frozen=True, repr=False)
class Forecast:
    """What a step of a program takes on each device.

    `planned_for` is the hardware that the program was planned for, if that is another one, and
    `pipelines` are its pipelines (`gshard.pipelining`).
    """

    hardware: Hardware
    topology: Topology
    devices: int
    operators: tuple[Timed, ...]
    memory: Memory
    planned_for: str = ""
    pipelines: tuple[Any, ...] = ()

    def __repr__(self) -> str:
        return (
            f"<gshard.forecast.Forecast on {self.devices} x {self.hardware.name}: step "
            f"{duration(self.step_seconds)}, {size(self.memory_bytes)} of "
            f"{size(self.hardware.memory)}, {size(self.sent_bytes)} sent by each device>"
        )

    @functools.cached_property
    def step_seconds(self) -> float:
        """One run of the program, with the overhead of a step; hidden communication is free."""
        spent = sum(t.total_seconds for t in self.operators)
        return float(spent) + self.hardware.efficiency.step_seconds

    @property
    def steps_per_second(self) -> float:
        """Runs of the program in a second."""
        return 1.0 / self.step_seconds

    @property
    def memory_bytes(self) -> int:
        """The peak on each device."""
        return self.memory.peak

    @property
    def sent_bytes(self) -> int:
        """What each device sends."""
        return sum(t.sent * t.count for t in self.operators)

    @property
    def fits(self) -> bool:
        """Whether the peak is within the device's memory."""
        return self.memory_bytes <= self.hardware.memory

    @property
    def hidden_seconds(self) -> float:
        """The time of communication during other operators; GPUs alone have any."""
        return float(sum(t.hidden_seconds * t.count for t in self.operators))

    @property
    def exposed_seconds(self) -> float:
        """The time of communication that nothing hides; it is part of `step_seconds`."""
        return float(sum(t.total_seconds for t in self.operators if t.collective))

    @property
    def serial_seconds(self) -> float:
        """One run of the program, if nothing were hidden."""
        return self.step_seconds + self.hidden_seconds

    @functools.cached_property
    def values(self) -> tuple[Timed, ...]:
        """The operators; for a collective that combines values, the share of each value."""
        return tuple(value for t in self.operators for value in t.members or (t,))

    def by(self, key: Callable[[Timed], str]) -> dict[str, Total]:
        """Seconds, bytes sent, arithmetic and memory traffic summed by a key, slowest first."""
        found: dict[str, list[Timed]] = {}
        for operator in self.values:
            found.setdefault(key(operator), []).append(operator)
        parts = {name: Total.of(members) for name, members in found.items()}
        if outside := self.hardware.efficiency.step_seconds:
            parts[OUTSIDE] = Total(outside, 0.0, 0.0, 0, 0.0, "the host")
        return dict(sorted(parts.items(), key=lambda item: -item[1].seconds))

    def as_dict(self, part: Callable[[Timed], str] | None = None) -> dict[str, Any]:
        """Machine-readable: numbers by name, each also by part."""
        parts = self.by(part or by_function)
        memory = self.memory
        return {
            "hardware": self.hardware.name,
            "topology": self.topology.name,
            "devices": self.devices,
            "planned_for": self.planned_for or self.hardware.name,
            "steps_per_second": self.steps_per_second,
            "step_seconds": self.step_seconds,
            "exposed_seconds": self.exposed_seconds,
            "hidden_seconds": self.hidden_seconds,
            "memory_bytes": self.memory_bytes,
            "sent_bytes": self.sent_bytes,
            "fits": self.fits,
            "parts": {
                name: {
                    "seconds": p.seconds,
                    "hidden_seconds": p.hidden_seconds,
                    "roofline_seconds": p.roofline_seconds,
                    "sent_bytes": p.sent,
                    "flops": p.flops,
                }
                for name, p in parts.items()
            },
            "memory": {
                "arguments": memory.arguments,
                "results": memory.results,
                "donated": memory.donated,
                "temporary": memory.temporary,
                "peak_at": memory.where,
                "held": [
                    {"bytes": h.bytes, "shape": h.shape, "source": h.source}
                    for h in memory.held[:12]
                ],
            },
        }

    def _repr_html_(self) -> str:
        parts = self.by(by_function)
        rows = [(name, *p.cells) for name, p in list(parts.items())[:20]]
        if len(parts) > len(rows):
            rest = sum(p.seconds for p in list(parts.values())[20:])
            rows.append((f"{len(parts) - 20} more", duration(rest), *[""] * 4))
        lines = "<br>".join(map(html.escape, summary(self)))
        return f"<p>{lines}</p>" + notebook_table(("part", *_COLUMNS), rows)

    def __str__(self) -> str:
        return "\n".join([*summary(self), "", *table(self.by(by_function))])


@dataclass(frozen=True)
class Total:
    """The sum of some operators."""

    seconds: float
    hidden_seconds: float  # of collectives, while other operators run; not in `seconds`
    roofline_seconds: float  # if every operator reached the peak of what bounds it
    sent: int
    flops: float
    bound: str

    @staticmethod
    def of(operators: Sequence[Timed]) -> Total:
        """The sum of operators; `bound` is the resource that limits most of the time."""
        bounds: dict[str, float] = {}
        for t in operators:
            bounds[t.bound] = bounds.get(t.bound, 0.0) + t.total_seconds
        return Total(
            float(sum(t.total_seconds for t in operators)),
            float(sum(t.hidden_seconds * t.count for t in operators)),
            float(sum(t.roofline_seconds * t.count for t in operators)),
            sum(t.sent * t.count for t in operators),
            float(sum(t.flops * t.count for t in operators)),
            max(bounds, key=lambda b: bounds[b]),
        )

    @property
    def cells(self) -> tuple[str, ...]:
        """As tables show it: time, hidden time, roofline, bytes sent and the limit."""
        times = (self.seconds, self.hidden_seconds, self.roofline_seconds)
        shown = (duration(seconds) if seconds else "" for seconds in times)
        return (*shown, size(self.sent) if self.sent else "", self.bound)


_COLUMNS = ("time", "hidden", "roofline", "sent", "limited by")


def time_bars(parts: Mapping[str, Total]) -> dict[str, list[tuple[str, float, str]]]:
    """The bars of a plot: the time of each part, what of it is hidden, and the roofline."""
    hides = any(p.hidden_seconds for p in parts.values())
    return {
        name: [
            (series, seconds, duration(seconds) if seconds else "")
            for series, seconds in (
                ("forecast", p.seconds),
                *([("hidden", p.hidden_seconds)] if hides else []),
                ("at the roofline", p.roofline_seconds),
            )
        ]
        for name, p in parts.items()
    }


def by_function(operator: Timed) -> str:
    """The user's file and function."""
    if operator.source == "unknown":
        return "elsewhere"
    return f"{Path(operator.source).name.split(':')[0]} {operator.function}"


def summary(f: Forecast) -> list[str]:
    """The step, the memory and what is sent, a line each."""
    memory = f.memory
    room = "fits in" if f.fits else "DOES NOT FIT in"
    planned = f"  plan    for {f.planned_for}; gshard.jit(hardware=...) plans for these devices"
    return [
        f"{f.devices} x {f.hardware.name}, {f.topology.name}",
        *([planned] if f.planned_for else []),
        f"  step    {duration(f.step_seconds)}, {per_second(f)} steps per second",
        *(f"  stages  {pipe}" for pipe in f.pipelines),
        f"  links   {links(f)}",
        f"  memory  {size(f.memory_bytes)} on each device, {room} {size(f.hardware.memory)}: "
        f"{size(memory.arguments)} arguments, {size(memory.results - memory.donated)} other "
        f"results, {size(memory.temporary)} temporary at {memory.where}",
        f"  sent    {size(f.sent_bytes)} by each device",
    ]


def per_second(f: Forecast) -> str:
    """Steps per second, in digits."""
    rate = f.steps_per_second
    return f"{rate:.3g}" if rate < 1000 else f"{rate:,.0f}"


def links(f: Forecast) -> str:
    """How long communication takes, and how much of it products hide."""
    spent = f.exposed_seconds + f.hidden_seconds
    if not spent:
        return "no communication"
    if not f.hardware.overlaps:
        return f"{duration(spent)} of communication, none of it hidden"
    return (
        f"{duration(spent)} of communication: {duration(f.hidden_seconds)} hidden, "
        f"{duration(f.exposed_seconds)} exposed"
    )


def table(parts: dict[str, Total], rows: int = 20) -> list[str]:
    """The slowest parts, a line each."""
    width = max(map(len, parts), default=4)
    shown = [("part", *_COLUMNS), *((n, *p.cells) for n, p in list(parts.items())[:rows])]
    lines = [
        f"{name:<{width}}  {'  '.join(f'{cell:>9}' for cell in cells)}  {bound}"
        for name, *cells, bound in shown
    ]
    if len(parts) > rows:
        rest = sum(p.seconds for p in list(parts.values())[rows:])
        lines.append(f"{len(parts) - rows} more{'':<{max(width - 7, 0)}}  {duration(rest):>9}")
    return lines


def trace(forecast: Forecast) -> dict[str, Any]:
    """One track for arithmetic and memory, one for links; all runs of an operator are one slice."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": forecast.hardware.name}}
    ]
    for track, name in enumerate(("arithmetic and memory", "links"), 1):
        events.append(
            {"ph": "M", "pid": 1, "tid": track, "name": "thread_name", "args": {"name": name}}
        )
    now = 0.0
    for t in forecast.operators:
        length = float(t.total_seconds) * 1e6
        told = {"line": t.source, "runs": t.count, "bound by": t.bound, "reason": t.reason}
        told |= {"flops": t.flops, "bytes": t.bytes, "sent": t.sent}
        ran = {"ph": "X", "pid": 1, "tid": 2 if t.collective else 1, "ts": now, "dur": length}
        events.append({**ran, "name": t.collective or t.name, "cat": t.phase, "args": told})
        now += length
    return {"traceEvents": events, "displayTimeUnit": "ms"}
