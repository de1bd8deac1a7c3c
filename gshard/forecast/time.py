"""The time of a step: the sum of a roofline for every operator.

An operator takes as long as its slowest resource: arithmetic, memory or links. Operators run one
after the other, except that GPUs run collectives beside products that do not need them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from gshard.forecast.collective import Topology, collective_terms, reach
from gshard.forecast.hardware import Hardware
from gshard.forecast.program import DeviceOperator, trips, walk
from gshard.forecast.work import (
    moved_bytes,
    multiplies,
    product_flops,
    product_seconds,
    vector_flops,
)
from gshard.graph.regions import bodies
from gshard.graph.schedule import overlapped
from gshard.graph.source import reason_of, scopes_of, site_of, source_of
from gshard.moving.inventory import combined_values, shares, transfers


@dataclass(frozen=True)
class Timed:
    """One operator of the program: its work in one run, and how often it runs."""

    name: str
    source: str  # the user's file:line
    function: str
    scope: tuple[str, ...]  # names of the user's `jax.named_scope`s, the outermost first
    phase: str  # "forward", "backward", or "other": outside of differentiation
    count: int
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
    # Of a collective that combines values: the share of each, at its own line and scope.
    members: tuple[Timed, ...] = field(default=(), repr=False)
    hidden_seconds: float = 0.0  # of a collective: while other operators run
    overlapped_with: tuple[str, ...] = ()  # the lines of the products among these

    @property
    def alone_seconds(self) -> float:
        """One run of it, if nothing else runs beside it."""
        slowest = max(self.arithmetic_seconds, self.memory_seconds, self.link_seconds)
        return slowest + self.start_seconds

    @property
    def seconds(self) -> float:
        """One run of it, without what is hidden."""
        return self.alone_seconds - self.hidden_seconds

    @property
    def total_seconds(self) -> float:
        """All runs of it."""
        return self.seconds * self.count

    @property
    def bound(self) -> str:
        """The resource that limits it."""
        if self.collective:
            return "links"
        return "arithmetic" if self.arithmetic_seconds > self.memory_seconds else "memory"


def timed(jaxpr: Jaxpr, machine: Hardware, topology: Topology) -> list[Timed]:
    """Every operator of a per-device program, in its order."""
    found: list[Timed] = []
    bodies: dict[tuple[JaxprEqn, ...], dict[int, DeviceOperator]] = {}
    for operator, count, around in walk(jaxpr, machine.compiler):
        bodies.setdefault(around, {})[len(found)] = operator
        found.append(_timed(operator, count, around, machine, topology))
    combined = dict(_combined(jaxpr))
    for around, body in bodies.items():
        if machine.overlaps:
            _overlap(found, body)
        for number, operator in body.items():
            found[number] = _shared(found[number], operator, around, topology, combined)
    return found


def _overlap(found: list[Timed], body: Mapping[int, DeviceOperator]) -> None:
    """Note of the collectives of one body, by their numbers, which products run beside them."""
    steps = [(i, operator.reads, operator.writes) for i, operator in body.items()]
    sends = {i: found[i].alone_seconds for i in body if found[i].collective}
    works = {i: found[i].alone_seconds for i in body if i not in sends}
    products = {i for i, operator in body.items() if any(map(multiplies, operator.members))}
    for i, sent in overlapped(steps, sends, works, products).items() if sends else ():
        found[i] = replace(
            found[i],
            hidden_seconds=sends[i] - sent.exposed,
            overlapped_with=tuple(dict.fromkeys(found[product].source for product in sent.beside)),
        )


def _timed(
    operator: DeviceOperator,
    count: int,
    around: tuple[JaxprEqn, ...],
    machine: Hardware,
    topology: Topology,
) -> Timed:
    root, efficiency = operator.root, machine.efficiency
    site = _site(operator)
    source, function = site_of(site)
    flops, arithmetic, links, peak, sent, members = 0.0, 0.0, 0.0, 0.0, 0, 1
    moves = [t for op in operator.members for t in transfers(op.eqn)]
    for t in moves:
        busy, wait = collective_terms(topology, t.kind, t.size, t.groups, pairs=t.groups)
        links += (
            busy / efficiency.links + wait + efficiency.skew_seconds * reach(topology, t.groups)
        )
        members = len(t.groups[0]) if t.groups else topology.devices
        peak += busy
        sent += t.sent(topology.devices)
    if not moves:
        products = [op for op in operator.members if multiplies(op)]
        vector = vector_flops(operator)
        flops = vector + sum(map(product_flops, products))
        arithmetic = max(  # different units of a core, which work in parallel
            vector / machine.vector_rate,
            sum(product_seconds(op, machine) for op in products),
        )
    moved, others = moved_bytes(operator), len(operator.members) - 1
    return Timed(
        name=root.name + (f" and {others} more" if others else ""),
        source=source,
        function=function,
        scope=_scope(around, site),
        phase=phase_of((*around, root.eqn)),
        count=count,
        flops=flops,
        bytes=moved,
        sent=sent,
        arithmetic_seconds=arithmetic,
        memory_seconds=moved / (machine.memory_bandwidth * efficiency.memory),
        link_seconds=links,
        start_seconds=efficiency.operator_seconds,
        roofline_seconds=max(
            arithmetic * efficiency.products, moved / machine.memory_bandwidth, peak
        ),
        collective=moves[0].kind if moves else "",
        group_size=members,
        reason=str(reason_of(root.eqn)),
        shape=operator.writes[0].aval.str_short(short_dtypes=True) if operator.writes else "",
        loops=tuple(f"{e.primitive.name} x {trips(e)} at {source_of(e)}" for e in around),
        value=_value(operator),
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
    source, function = site_of(eqn)
    return replace(
        collective,
        source=source,
        function=function,
        scope=_scope(around, eqn),
        phase=phase_of((*around, eqn)),
        bytes=part * collective.bytes,
        sent=sent,
        memory_seconds=part * collective.memory_seconds,
        link_seconds=part * collective.link_seconds,
        start_seconds=part * collective.start_seconds,
        hidden_seconds=part * collective.hidden_seconds,
        roofline_seconds=part * collective.roofline_seconds,
        reason=str(reason_of(eqn)),
    )


def _scope(around: tuple[JaxprEqn, ...], eqn: JaxprEqn) -> tuple[str, ...]:
    return tuple(name for each in (*around, eqn) for name in scopes_of(each))


def _value(operator: DeviceOperator) -> Any:
    """The first result; of a copy that a compiler adds, what is copied."""
    values = operator.reads if operator.root.added else operator.writes
    return values[0] if values else None


def _site(operator: DeviceOperator) -> JaxprEqn:
    """The first member with a line of user code, else the root."""
    eqns = (op.eqn for op in operator.members)
    return next((e for e in eqns if site_of(e)[0] != "unknown"), operator.root.eqn)


def phase_of(eqns: Iterable[JaxprEqn]) -> str:
    """Forward or backward, from the marks that differentiation leaves in names."""
    names = [str(e.source_info.name_stack) for e in eqns]
    if any("transpose(" in n for n in names):
        return "backward"
    return "forward" if any("jvp(" in n for n in names) else "other"
