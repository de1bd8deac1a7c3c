"""How long a step takes: a roofline for every operator, and the sum.

An operator takes as long as its slowest resource: arithmetic, memory or links. Operators run one
after the other: that a compiler may hide a collective behind arithmetic is not counted, `overlap`
says how much of the links' time could be hidden at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from gshard.forecast.collective import Groups, Topology, collective_seconds
from gshard.forecast.hardware import Hardware
from gshard.forecast.program import COLLECTIVES, PRODUCTS, Op, Operator, size_of, walk
from gshard.forecast.work import is_exact, product_flops, vector_flops
from gshard.source import reason_of, site_of


@dataclass(frozen=True)
class Timed:
    """One operator of the program: what it does in one run, and how often it runs."""

    name: str
    source: str  # the user's file:line
    function: str
    phase: str  # "forward", "backward" or "update"
    count: int
    flops: float
    bytes: float
    sent: int
    arithmetic_seconds: float
    memory_seconds: float
    link_seconds: float
    start_seconds: float
    collective: str = ""
    group_size: int = 1
    reason: str = ""

    @property
    def seconds(self) -> float:
        """One run of it."""
        slowest = max(self.arithmetic_seconds, self.memory_seconds, self.link_seconds)
        return slowest + self.start_seconds

    @property
    def total_seconds(self) -> float:
        """All runs of it."""
        return self.seconds * self.count

    @property
    def bound(self) -> str:
        """The resource that it waits for."""
        if self.collective:
            return "links"
        return "arithmetic" if self.arithmetic_seconds > self.memory_seconds else "memory"


def timed(jaxpr: Jaxpr, machine: Hardware, topology: Topology) -> list[Timed]:
    """Every operator of a per-device program, in its order."""
    return [
        _timed(operator, count, around, machine, topology)
        for operator, count, around in walk(jaxpr, machine.compiler)
    ]


def _timed(
    operator: Operator,
    count: int,
    around: tuple[JaxprEqn, ...],
    machine: Hardware,
    topology: Topology,
) -> Timed:
    root, reached = operator.root, machine.reached
    source, function = _site(operator)
    flops, arithmetic, links, sent, members = 0.0, 0.0, 0.0, 0, 1
    kind = COLLECTIVES.get(root.name, "")
    if kind:
        for var in root.eqn.invars:
            seconds, bytes_sent, members = collective_cost(root.eqn, size_of(var), topology)
            links += seconds / reached.links
            sent += bytes_sent
    else:
        products = [op for op in operator.members if op.name in PRODUCTS]
        vector = vector_flops(operator)
        flops = vector + sum(map(product_flops, products))
        arithmetic = max(  # different units of a core, busy at once
            vector / machine.vector_rate,
            sum(_product_seconds(op, machine) for op in products),
        )
    moved = _moved(operator)
    return Timed(
        name=root.name if len(operator.members) == 1 else f"{root.name} and {len(operator.members) - 1} more",
        source=source,
        function=function,
        phase=phase_of((*around, root.eqn)),
        count=count,
        flops=flops,
        bytes=moved,
        sent=sent,
        arithmetic_seconds=arithmetic,
        memory_seconds=moved / (machine.memory_bandwidth * reached.memory),
        link_seconds=links,
        start_seconds=reached.operator_seconds,
        collective=kind,
        group_size=members,
        reason=reason_of(root.eqn),
    )


def _product_seconds(op: Op, machine: Hardware) -> float:
    dtype = op.eqn.invars[0].aval.dtype
    return product_flops(op) / (machine.rate(dtype, is_exact(op)) * machine.reached.products)


def _moved(operator: Operator) -> float:
    """Bytes of memory that an operator touches: of a lookup or a slice only the rows it takes."""
    written = sum(map(size_of, operator.writes))
    names = {op.name for op in operator.members}
    if names & {"gather", "dynamic_slice", "slice"}:
        return written + sum(min(size_of(v), 2 * written) for v in operator.reads)
    if operator.root.name in ("dynamic_update_slice", "scatter", "scatter-add", "scatter_add"):
        return 2 * sum(map(size_of, operator.reads[1:])) + 0.0
    return float(operator.bytes)


def collective_cost(eqn: JaxprEqn, size: int, topology: Topology) -> tuple[float, int, int]:
    """The seconds of a collective, the bytes that a device sends, and the size of its groups."""
    kind = COLLECTIVES[eqn.primitive.name]
    if kind == "collective_permute":
        pairs: Groups = tuple((int(a), int(b)) for a, b in eqn.params["perm"])
        return collective_seconds(topology, kind, size, pairs=pairs), size, 2
    listed = eqn.params.get("axis_index_groups")
    groups: Groups = tuple(tuple(map(int, g)) for g in listed) if listed else ()
    members = max(map(len, groups)) if groups else topology.devices
    sent = {
        "all_reduce": 2 * size * (members - 1) // members,
        "all_gather": size * (members - 1),
        "all_to_all": size * (members - 1) // members,
        "reduce_scatter": size * (members - 1) // members,
    }[kind]
    return collective_seconds(topology, kind, size, groups), sent, members


def _site(operator: Operator) -> tuple[str, str]:
    """The user's line and function, of the first member that has one."""
    for op in operator.members:
        line, function = site_of(op.eqn)
        if line != "unknown":
            return line, function
    return "unknown", ""


def phase_of(eqns: Iterable[JaxprEqn]) -> str:
    """Forward, backward or update, from the marks that differentiation leaves in names."""
    names = [str(e.source_info.name_stack) for e in eqns]
    if any("transpose(" in n for n in names):
        return "backward"
    return "forward" if any("jvp(" in n for n in names) else "other"


def by(operators: Iterable[Timed], key: Callable[[Timed], Any]) -> dict[Any, float]:
    """Seconds summed by a key, the largest first."""
    total: dict[Any, float] = {}
    for t in operators:
        total[key(t)] = total.get(key(t), 0.0) + t.total_seconds
    return dict(sorted(total.items(), key=lambda item: -item[1]))
