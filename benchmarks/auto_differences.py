"""Where a layout's gap comes from: its forecast beside the bound, line by line.

The forecast is of the lowered program; the bound is the lower-bound model of the program before it
is partitioned, solved with the layout's arguments. What they differ by is work or communication
that the model does not count, or that the partitioner could do without.

    python -m benchmarks.auto_paper --devices 8 --differences
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from gshard import Layout
from gshard.autosharding.cost import NONE, specs_of
from gshard.autosharding.cost.lower_bound import LowerBoundBuilder
from gshard.autosharding.cost.model import MeshProblem
from gshard.autosharding.cost.strategies import PICO
from gshard.autosharding.layout.annotations import spec_of
from gshard.autosharding.solver import solve
from gshard.autosharding.solver.problem import FORBIDDEN, Problem
from gshard.autosharding.traced import TracedProgram
from gshard.forecast.hardware import Hardware
from gshard.forecast.program import body_of
from gshard.graph.source import site_of

_SECONDS = 60.0  # for the solver


@dataclasses.dataclass
class Line:
    """Seconds of one line of the user's program, as the lowered program and as the model has it."""

    work: float = 0.0
    sent: float = 0.0
    work_bound: float = 0.0
    sent_bound: float = 0.0

    @property
    def difference(self) -> float:
        """By how much the forecast is above the model."""
        return self.work + self.sent - self.work_bound - self.sent_bound


def differences(layout: Layout, machine: Hardware) -> dict[str, Line]:
    """The lines of the program that a layout was chosen for, the largest difference first."""
    assert layout.lowered is not None
    assert layout.function is not None
    subject = TracedProgram.of(layout.function, layout.arguments, layout.devices)
    mesh = tuple(layout.mesh.values())
    model = LowerBoundBuilder(subject, mesh, machine, layout.limit).built()
    answer = solve(_with_arguments(model, layout, subject), _SECONDS).answer
    assert answer is not None
    lines: dict[str, Line] = defaultdict(Line)
    for operator in layout.lowered.forecast(machine).operators:
        line, seconds = lines[operator.source], operator.alone_seconds * operator.count
        if operator.collective:
            line.sent += seconds
        else:
            line.work += seconds
    for source, is_work, seconds in _model_lines(model, subject, machine, answer):
        if is_work:
            lines[source].work_bound += seconds
        else:
            lines[source].sent_bound += seconds
    return dict(sorted(lines.items(), key=lambda item: -abs(item[1].difference)))


def _with_arguments(model: MeshProblem, layout: Layout, subject: TracedProgram) -> Problem:
    """The problem of a model with the specs of arguments that a layout has."""
    by_path = {a.path: a for a in layout.annotations}
    costs = list(model.problem.costs)
    given = subject.flat.jaxpr.invars[subject.closed_over :]
    for (path, shape), var in zip(subject.paths, given, strict=True):
        node = model.nodes.get(var, -1)
        if node < 0:
            continue
        unsplit = (NONE,) * len(model.mesh)
        spec = spec_of(by_path[path].dims, tuple(layout.mesh)) if path in by_path else unsplit
        taken = np.array([s == tuple(spec) for s in specs_of(shape, model.mesh)])
        costs[node] = np.where(taken, costs[node], FORBIDDEN)
    return dataclasses.replace(model.problem, costs=tuple(costs))


def _model_lines(
    model: MeshProblem, subject: TracedProgram, machine: Hardware, answer: Sequence[int]
) -> Iterator[tuple[str, bool, float]]:
    """The lines of a model's costs, whether each is work, and its seconds.

    An equation counts at the line of the operator that it is fused into, as in forecasts; copies
    that a loop makes count at the loop.
    """
    fused, copied = {}, {}
    body = body_of(subject.flat.jaxpr, machine.compiler, subject.devices)
    for operator, _, around in body.walk():
        eqns = [op.eqn for op in operator.members]
        sources = (site_of(eqn)[0] for eqn in eqns)
        source = next((s for s in sources if s != "unknown"), "unknown")
        for eqn in eqns:
            fused.setdefault(id(eqn), source)
        if operator.root.added and around:
            copied.update(dict.fromkeys(operator.reads, site_of(around[-1])[0]))
    tensors = {node: var for var, node in model.nodes.items()}
    problem = model.problem
    for node, costs in enumerate(problem.costs):
        if node in model.operators:
            eqn = model.operators[node]
            yield fused.get(id(eqn), site_of(eqn)[0]), True, costs[answer[node]] / PICO
        elif node in tensors:
            yield copied.get(tensors[node], "copies of tensors"), True, costs[answer[node]] / PICO
        else:
            yield "moves of tensors", False, costs[answer[node]] / PICO
    for edge in problem.edges:
        eqn = model.operators.get(edge.first) or model.operators.get(edge.second)
        source = "moves of tensors" if eqn is None else site_of(eqn)[0]
        yield source, False, edge.costs[answer[edge.first], answer[edge.second]] / PICO


def table(lines: dict[str, Line], most: int = 30) -> str:
    """The lines as text, in milliseconds."""
    total = Line(*np.sum([dataclasses.astuple(line) for line in lines.values()], axis=0))
    header = f"{'forecast':>18} {'bound':>18} {'difference':>10}\n" + (
        f"{'work':>9}{'sent':>9} {'work':>9}{'sent':>9}   of milliseconds"
    )
    rows = [("all lines", total), *list(lines.items())[:most]]
    return "\n".join([header, *(_row(name, line) for name, line in rows)])


def _row(name: str, line: Line) -> str:
    parts = [1e3 * n for n in (line.work, line.sent, line.work_bound, line.sent_bound)]
    figures = "{:9.3f}{:9.3f} {:9.3f}{:9.3f}".format(*parts)
    return f"{figures} {1e3 * line.difference:10.3f}  {name}"
