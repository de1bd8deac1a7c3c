"""XLA's program of a step and gshard's: what each sends, holds and costs, line by line, and why.

XLA compiles both for virtual CPU devices; what differs on accelerators is counted as they run it
(`explanation.hlo`). Times are forecasts for one hardware: gshard's of its program, XLA's of the
same local work with the products that XLA's program has, and of its own collectives on the same
links.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gshard.comparing.step import Step
from gshard.explanation.findings import LineCost, summed
from gshard.explanation.hlo import HloProgram
from gshard.forecast import Forecast, Hardware, hardware
from gshard.forecast.collective import Topology, collective_terms, reach
from gshard.graph.readable import counted, duration, size
from gshard.moving.inventory import Collective, Transfer
from gshard.pages import checked, render, style

_HERE = Path(__file__).parent
_WORTH = 1.05  # times as fast, from which on a change of the partitioner is worth it
_LINES = 12  # shown on one screen
_CHANGES = {"gshard": "gshard.jit instead of jax.jit", "auto": "what gshard.auto chose"}

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Figures:
    """What one program does on each device; `memory` as XLA allocates it, None if unknown."""

    name: str
    sent: int
    collectives: int
    memory: int | None
    seconds: float
    exposed: float


@dataclass(frozen=True)
class Line:
    """One line of the user's code: bytes of both programs, and why they differ."""

    line: str
    xla: int
    gshard: int
    why: str


@dataclass(frozen=True)
class Comparison:
    """The programs of one step; prints as one screen."""

    step: str
    devices: int
    hardware: str
    programs: tuple[Figures, ...]  # XLA's, gshard's, and that of `gshard.auto` if it was asked for
    lines: tuple[Line, ...]  # where bytes differ, the largest difference first
    same: tuple[int, int]  # how many lines send the same, and their bytes
    notes: tuple[str, ...]

    @property
    def verdicts(self) -> list[str]:
        """Whether each change is worth it, with the figures."""
        xla, *others = self.programs
        found = []
        for other in others:
            ratio = xla.seconds / other.seconds
            word = "worth it" if ratio >= _WORTH else "not worth it"
            found.append(
                f"{word}: {_CHANGES[other.name]}: {ratio:.2f} times as fast by forecast "
                f"({duration(other.seconds)}, XLA {duration(xla.seconds)})"
            )
        return found

    def __str__(self) -> str:
        heads = f"{'':<8} {'sent':>9} {'collectives':>12} {'memory':>9} {'step':>9} {'exposed':>9}"
        rows = [
            f"{p.name:<8} {size(p.sent):>9} {p.collectives:>12,} {_held(p):>9} "
            f"{duration(p.seconds):>9} {duration(p.exposed):>9}"
            for p in self.programs
        ]
        top = f"{self.step} on {self.devices} x {self.hardware}, per device and step"
        notes = [line for note in self.notes for line in textwrap.wrap(note, 100)]
        return "\n".join([top, heads, *rows, "", *self._differences(), *notes, *self.verdicts])

    def _differences(self) -> Iterator[str]:
        width = max((len(row.line) for row in self.lines[:_LINES]), default=4)
        if self.lines:
            yield f"{'line':<{width}} {'XLA':>9} {'gshard':>9}  why they differ"
        for row in self.lines[:_LINES]:
            yield f"{row.line:<{width}} {size(row.xla):>9} {size(row.gshard):>9}  {row.why}"
        if len(self.lines) > _LINES:
            rest = self.lines[_LINES:]
            both = f"{size(sum(r.xla for r in rest)):>9} {size(sum(r.gshard for r in rest)):>9}"
            yield f"{counted(len(rest), 'more line'):<{width}} {both}"
        number, sent = self.same
        if number:
            yield f"{counted(number, 'line')} with the same bytes in both: {size(sent)}"

    def as_dict(self) -> dict[str, Any]:
        """Machine-readable."""
        return {**asdict(self), "verdicts": self.verdicts}

    def page(self) -> str:
        """One HTML file that needs nothing else; needs the extra `plots`."""
        most = max((max(row.xla, row.gshard) for row in self.lines), default=1) / 100
        return render(
            _HERE,
            "compare.html",
            title=f"{self.step}: XLA and gshard",
            style=style(_HERE, "tokens.css", "page.css", "compare.css"),
            data=checked(self.as_dict()),
            comparison=self,
            programs=[
                (p.name, size(p.sent), f"{p.collectives:,}", _held(p), duration(p.seconds),
                 duration(p.exposed)) for p in self.programs
            ],
            rows=[
                (r.line, size(r.xla), size(r.gshard), r.why,
                 f"{r.xla / most:.1f}", f"{r.gshard / most:.1f}") for r in self.lines
            ],
            same=f"{counted(self.same[0], 'line')} with the same bytes: {size(self.same[1])}",
        )  # fmt: skip


def _held(program: Figures) -> str:
    return "?" if program.memory is None else size(program.memory)


def compare(
    step: Step, machine: str | Path | Hardware, seconds: float = 0.0, tell: Tell = lambda _: None
) -> Comparison:
    """Both programs of a step; with `seconds`, what `gshard.auto` reaches in about as many."""
    chosen = hardware(machine)
    tell("XLA partitions and compiles the step")
    compiled = step.by_xla()
    text = compiled.as_text() or ""
    devices = int((re.search(r"num_partitions=(\d+)", text) or [0, 1])[1])
    tell("gshard partitions it")
    lowered = step.by_gshard(chosen)
    own = lowered.forecast()
    tell("XLA compiles gshard's program")
    finished = lowered.compile()
    accelerator = chosen.compiler != "cpu"
    theirs = list(HloProgram(text, devices, accelerator).collectives())
    ours = HloProgram(finished.as_text() or "", own.devices)
    work = HloProgram(text, devices).product_flops() / (ours.product_flops() or 1.0)
    programs = [
        _of_xla(theirs, _allocated(compiled), own, work),
        _of_gshard("gshard", own, len(lowered.collectives), _allocated(finished)),
    ]
    notes = list(_notes(text, devices, theirs, own, work))
    if seconds:
        tell(f"gshard.auto chooses annotations, about {seconds:.0f} seconds")
        try:
            layout = step.by_auto(hardware=chosen, devices=own.devices, seconds=seconds)
            found = layout.lowered
            assert found is not None
            count = len(found.collectives)
            programs.append(_of_gshard("auto", found.forecast(), count, None))
        except (TypeError, ValueError) as error:
            notes.append(f"gshard.auto: {str(error).splitlines()[0]}")
    lines, same = _by_line([c for c, _ in theirs], lowered.collectives)
    on = (own.devices, own.hardware.name)
    return Comparison(step.name, *on, tuple(programs), lines, same, tuple(notes))


def _allocated(compiled: Any) -> int | None:
    """What XLA allocates on each device."""
    found = compiled.memory_analysis()
    if found is None:
        return None
    kept = found.output_size_in_bytes - found.alias_size_in_bytes
    return int(found.argument_size_in_bytes + kept + found.temp_size_in_bytes)


def _of_gshard(name: str, own: Forecast, count: int, memory: int | None) -> Figures:
    memory = own.memory_bytes if memory is None else memory
    return Figures(name, own.sent_bytes, count, memory, own.step_seconds, own.exposed_seconds)


def _of_xla(
    sent: Sequence[tuple[Collective, Transfer]], memory: int | None, own: Forecast, work: float
) -> Figures:
    """XLA's program: gshard's local work with `work` times the products, and its own collectives.

    The share of communication that products hide is taken to be the same.
    """
    spent = own.exposed_seconds + own.hidden_seconds
    exposed = own.exposed_seconds / spent if spent else 1.0
    links = exposed * sum(_seconds(t, own) * c.count for c, t in sent)
    local = own.step_seconds - own.exposed_seconds
    total = sum(c.total_bytes for c, _ in sent)
    step = local + (work - 1.0) * _products(own) + links
    return Figures("XLA", total, len(sent), memory, step, links)


def _products(own: Forecast) -> float:
    """The time of operators that arithmetic bounds."""
    return float(sum(t.total_seconds for t in own.operators if t.bound == "arithmetic"))


def _seconds(moved: Transfer, own: Forecast) -> float:
    """The time of a collective, as `forecast.time` has it for gshard's."""
    topology: Topology = own.topology
    busy, wait = collective_terms(topology, moved.kind, moved.size, moved.groups, moved.groups)
    paid = own.hardware.efficiency
    skew = paid.skew_seconds * reach(topology, moved.groups)
    return float(busy / paid.links + wait + skew + paid.operator_seconds)


def _notes(
    text: str, devices: int, theirs: Sequence[tuple[Collective, Transfer]], own: Forecast,
    work: float,
) -> Iterator[str]:  # fmt: skip
    written = sum(c.total_bytes for c, _ in HloProgram(text, devices).collectives())
    counted_as = sum(c.total_bytes for c, _ in theirs)
    if devices < own.devices:
        yield f"XLA runs the step on {counted(devices, 'device')}: nothing in it is sharded"
    if written != counted_as:
        yield (
            f"XLA's HLO for this CPU sends {size(written)}; for {own.hardware.name} XLA keeps "
            "16-bit floats and uses a ReduceScatter where each device needs one slice of a sum"
        )
    if abs(work - 1.0) * _products(own) > 0.01 * own.step_seconds:
        yield f"XLA's program multiplies {work:.2f} times as much as gshard's on each device"


def _by_line(
    theirs: Sequence[Collective], ours: Sequence[Collective]
) -> tuple[tuple[Line, ...], tuple[int, int]]:
    """The lines where bytes differ, and how many send the same."""
    xla, own = _costs(theirs), _costs(ours)
    nothing = LineCost("", (), 0.0, 0)
    pairs = {line: (xla.get(line, nothing), own.get(line, nothing)) for line in {**xla, **own}}
    same = [now.sent for before, now in pairs.values() if before.sent == now.sent]
    rows = [
        Line(line, before.sent, now.sent, _why(before, now))
        for line, (before, now) in pairs.items()
        if before.sent != now.sent
    ]
    rows.sort(key=lambda r: -abs(r.xla - r.gshard))
    return tuple(rows), (len(same), sum(same))


def _costs(collectives: Sequence[Collective]) -> dict[str, LineCost]:
    """What each line sends; lines are without the path of a module of torch."""
    values = (value for c in collectives for value in c.members or (c,))
    return {c.name: c for c in summed(values, lambda c: c.source.partition(", ")[0], {}, {})}


def _why(theirs: LineCost, ours: LineCost) -> str:
    """What either sends at a line, the largest first, and because of which operator."""
    parts = []
    for name, found in (("XLA", theirs), ("gshard", ours)):
        kinds = [*dict.fromkeys(f"{c.kind} {_because(c)}" for c in found.values)]
        more = f" and {len(kinds) - 1} more" if len(kinds) > 1 else ""
        parts.append(f"{name}: {kinds[0]}{more}" if kinds else f"{name}: nothing")
    return "; ".join(parts)


def _because(collective: Collective) -> str:
    why = collective.why
    if why.operator == "XLA":
        return why.detail
    return f"for the {why.kind} of {why.operator}" if why.kind != "step" else f"in {why.operator}"
