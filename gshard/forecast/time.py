"""The time of a step: the sum of a roofline for every operator.

An operator takes as long as its slowest resource: arithmetic, memory or links. Operators run one
after the other, except that GPUs run collectives during products that do not need them.

When transfers overlap, one begins when what it sends is there and the links are free. A step that
waits for one lets later steps pass, but not many: schedules that save memory do not move products
far.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from gshard.forecast.collective import Topology, collective_terms, reach
from gshard.forecast.dataflow import Body, DeviceOperator
from gshard.forecast.hardware import Hardware
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


AHEAD = 8  # products among which a step is chosen that need not wait

Step = tuple[Any, Sequence[Any], Sequence[Any]]  # its name, what it reads and what it makes
Times = Mapping[Any, float]  # of steps, by their names


@dataclass(frozen=True)
class Sent:
    """A transfer: the time for which it is exposed, and the products that run then."""

    exposed: float
    overlapped: tuple[Any, ...]


@dataclass(frozen=True)
class _Ran:
    step: Any
    begin: float
    end: float

    def shared(self, begin: float, end: float) -> float:
        """How much of this time is within another."""
        return max(0.0, min(self.end, end) - max(self.begin, begin))


def overlapped(
    steps: Sequence[Step], sends: Times, works: Times, products: Set[Any]
) -> dict[Any, Sent]:
    """The transfers of a program in its schedule; `sends` and `works` have the times of its steps.

    `products` are those of `works` that count as hiding a transfer.
    """
    schedule = _TwoUnits(steps, sends, works, products)
    schedule.run()
    return {
        sent.step: Sent(
            sum(gap.shared(sent.begin, sent.end) for gap in schedule.idle),
            tuple(
                ran.step
                for ran in schedule.worked
                if ran.step in products and ran.shared(sent.begin, sent.end) > 0
            ),
        )
        for sent in schedule.sent
    }


class _TwoUnits:
    """One unit that computes, one that sends; the first step in order that can run does."""

    def __init__(self, steps: Sequence[Step], sends: Times, works: Times, products: Set[Any]):
        self.steps, self.sends, self.works, self.products = steps, sends, works, products
        made = {v for _, _, writes in steps for v in writes}
        self.reads = [
            [v for v in reads if not isinstance(v, Literal) and v in made] for _, reads, _ in steps
        ]
        self.ready: dict[Any, float] = {}
        self.working = self.sending = 0.0  # until when each unit is busy
        self.idle: list[_Ran] = []  # when nothing is computed
        self.worked: list[_Ran] = []
        self.sent: list[_Ran] = []

    def run(self) -> None:
        """All steps; at the end, what is still being sent is waited for."""
        left = dict.fromkeys(range(len(self.steps)))
        while left:
            number = self._next(left)
            if number is not None:
                self._work(number)
                del left[number]
        self._wait(self.sending)

    def _next(self, left: dict[int, None]) -> int | None:
        """The step to compute next; transfers on the way to it begin."""
        first: tuple[float, int] | None = None  # of those that wait: when it can run
        begun, passed, chosen = [], 0, None
        for number in left:
            step, when = self.steps[number][0], self._when(number)
            if step in self.sends:
                if when is not None:
                    self._send(number, when)
                    begun.append(number)
                continue
            if when is not None and when <= self.working:
                chosen = number
                break
            if when is not None and (first is None or when < first[0]):
                first = when, number
            passed += step in self.products
            if passed == AHEAD and first is not None:
                break
        for number in begun:
            del left[number]
        return first[1] if chosen is None and first is not None else chosen

    def _when(self, number: int) -> float | None:
        """When a step has all that it reads; None as long as something of it is not computed."""
        latest = 0.0
        for var in self.reads[number]:
            when = self.ready.get(var)
            if when is None:
                return None
            latest = max(latest, when)
        return latest

    def _send(self, number: int, when: float) -> None:
        step, _, writes = self.steps[number]
        begin = max(when, self.sending)
        self.sending = begin + self.sends[step]
        self.sent.append(_Ran(step, begin, self.sending))
        self.ready.update(dict.fromkeys(writes, self.sending))

    def _work(self, number: int) -> None:
        step, _, writes = self.steps[number]
        self._wait(self._when(number) or 0.0)
        begin = self.working
        self.working += self.works.get(step, 0.0)
        if self.working > begin:
            self.worked.append(_Ran(step, begin, self.working))
        self.ready.update(dict.fromkeys(writes, self.working))

    def _wait(self, until: float) -> None:
        if until > self.working:
            self.idle.append(_Ran(None, self.working, until))
            self.working = until
