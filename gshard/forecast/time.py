"""The time of a step: the sum of a roofline for every operator.

An operator takes as long as its slowest resource: arithmetic, memory or links. Operators run one
after the other, except that GPUs run collectives during products that do not need them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from gshard.forecast.collective import Topology, collective_terms, reach
from gshard.forecast.dataflow import Body, DeviceOperator
from gshard.forecast.hardware import Hardware
from gshard.forecast.schedule import overlapped
from gshard.forecast.work import Work, moved_bytes, multiplies, updates, work_of
from gshard.graph.regions import bodies
from gshard.graph.source import phase_of, reason_of, scopes_of, site_of, source_of, trips
from gshard.moving.inventory import combined_values, shares, transfers


@dataclass(frozen=True)
class Timed:
    """One operator of the program: its work in one run, and how often it runs.

    Stages of a pipeline wait for each other: a step takes `waited` runs of it on some device.
    """

    name: str
    source: str  # the user's file:line
    function: str
    scope: tuple[str, ...]  # names of the user's `jax.named_scope`s, the outermost first
    phase: str  # "forward", "backward", or "other": outside of differentiation
    count: int
    waited: int
    flops: float
    bytes: float
    sent: int
    arithmetic_seconds: float
    memory_seconds: float
    link_seconds: float
    start_seconds: float
    roofline_seconds: float  # at the peak of every resource
    collective: str = ""
    group_size: int = 1
    reason: str = ""
    shape: str = ""  # of its first result, on one device
    loops: tuple[str, ...] = ()  # around it, the outermost first
    value: Any = field(default=None, repr=False, compare=False)  # of the program
    # The share of each value that a collective combines, at its own line and scope.
    members: tuple[Timed, ...] = field(default=(), repr=False)
    hidden_seconds: float = 0.0  # of a collective: while other operators run
    overlapped_with: tuple[str, ...] = ()  # the lines of the products among these

    @property
    def alone_seconds(self) -> float:
        """One run of it, if nothing else runs at the time."""
        slowest = max(self.arithmetic_seconds, self.memory_seconds, self.link_seconds)
        return slowest + self.start_seconds

    @property
    def seconds(self) -> float:
        """One run of it, without what is hidden."""
        return self.alone_seconds - self.hidden_seconds

    @property
    def total_seconds(self) -> float:
        """All runs of it that a step waits for."""
        return self.seconds * self.waited

    @property
    def bound(self) -> str:
        """The resource that limits it."""
        if self.collective:
            return "links"
        return "arithmetic" if self.arithmetic_seconds > self.memory_seconds else "memory"


def timed(body: Body, machine: Hardware, topology: Topology) -> list[Timed]:
    """Every operator of a per-device program, in its order."""
    found: list[Timed] = []
    inside: dict[tuple[JaxprEqn, ...], dict[int, DeviceOperator]] = {}
    runs = zip(body.walk(), body.walk(own=True), strict=True)
    for (operator, waited, around), (_, own, _) in runs:
        inside.setdefault(around, {})[len(found)] = operator
        timing = _timed(operator, around, machine, topology)
        found.append(replace(timing, count=own, waited=waited))
    combined = dict(_combined(body.jaxpr))
    for around, operators in inside.items():
        if machine.overlaps:
            _overlap(found, operators)
        for number, operator in operators.items():
            found[number] = _shared(found[number], operator, around, topology, combined)
    return found


def _overlap(found: list[Timed], body: Mapping[int, DeviceOperator]) -> None:
    """Note of the collectives of one body, by their numbers, which products run meanwhile."""
    steps = [(i, operator.reads, operator.writes) for i, operator in body.items()]
    sends = {i: found[i].alone_seconds for i in body if found[i].collective}
    works = {i: found[i].alone_seconds for i in body if i not in sends}
    products = {i for i, operator in body.items() if any(map(multiplies, operator.members))}
    for i, sent in overlapped(steps, sends, works, products).items() if sends else ():
        found[i] = replace(
            found[i],
            hidden_seconds=max(0.0, sends[i] - sent.exposed),
            overlapped_with=tuple(dict.fromkeys(found[p].source for p in sent.overlapped)),
        )


def _timed(
    operator: DeviceOperator, around: tuple[JaxprEqn, ...], machine: Hardware, topology: Topology
) -> Timed:
    root, efficiency, site = operator.root, machine.efficiency, operator.site
    source, function = site_of(site)
    links, peak, sent, members = 0.0, 0.0, 0, 1
    moves = [t for op in operator.members for t in transfers(op.eqn)]
    for t in moves:
        busy, wait = collective_terms(topology, t.kind, t.size, t.groups, pairs=t.groups)
        links += (
            busy / efficiency.links + wait + efficiency.skew_seconds * reach(topology, t.groups)
        )
        members = len(t.groups[0]) if t.groups else topology.devices
        peak += busy
        sent += t.sent(topology.devices)
    work = Work(0.0, 0.0, moved_bytes(operator)) if moves else work_of(operator, machine)
    others, share = len(operator.members) - 1, efficiency.updates if updates(operator) else 1.0
    return Timed(
        name=root.name + (f" and {others} more" if others else ""),
        source=source,
        function=function,
        scope=scopes_of((*around, site)),
        phase=phase_of((*around, root.eqn)),
        count=1,
        waited=1,
        flops=work.flops,
        bytes=work.bytes,
        sent=sent,
        arithmetic_seconds=work.seconds,
        memory_seconds=work.bytes / (machine.memory_bandwidth * efficiency.memory * share),
        link_seconds=links,
        start_seconds=efficiency.operator_seconds,
        roofline_seconds=max(
            work.seconds * efficiency.products, work.bytes / machine.memory_bandwidth, peak
        ),
        collective=moves[0].kind if moves else "",
        group_size=members,
        reason=str(reason_of(root.eqn)),
        shape=operator.writes[0].aval.str_short(short_dtypes=True) if operator.writes else "",
        loops=tuple(f"{e.primitive.name} x {trips(e)} at {source_of(e)}" for e in around),
        value=operator.value,
    )


def _combined(jaxpr: Jaxpr) -> Iterator[tuple[JaxprEqn, list[JaxprEqn]]]:
    """The collectives that combine values, each with these, in a program and its bodies."""
    for eqn in jaxpr.eqns:
        if values := combined_values(jaxpr, eqn):
            yield eqn, values
        for body in bodies(eqn):
            yield from _combined(body)


def _shared(
    collective: Timed,
    operator: DeviceOperator,
    around: tuple[JaxprEqn, ...],
    topology: Topology,
    combined: Mapping[JaxprEqn, list[JaxprEqn]],
) -> Timed:
    """A collective with the share of each value that it combines, by their sizes."""
    members: list[Timed] = []
    for eqn in (op.eqn for op in operator.members if collective.collective):
        values = combined.get(eqn, [eqn])
        sent = sum(t.sent(topology.devices) for t in transfers(eqn))
        for value, share in zip(values, shares(sent, values), strict=True):
            members.append(_share(collective, value, share, around))
    return replace(collective, members=tuple(members)) if len(members) > 1 else collective


def _share(collective: Timed, eqn: JaxprEqn, sent: int, around: tuple[JaxprEqn, ...]) -> Timed:
    part = sent / (collective.sent or 1)
    shared = ("bytes", "memory_seconds", "link_seconds", "start_seconds", "hidden_seconds")
    parts: dict[str, Any] = {
        name: part * getattr(collective, name) for name in (*shared, "roofline_seconds")
    }
    source, function = site_of(eqn)
    return replace(
        collective,
        source=source,
        function=function,
        scope=scopes_of((*around, eqn)),
        phase=phase_of((*around, eqn)),
        sent=sent,
        reason=str(reason_of(eqn)),
        **parts,
    )
