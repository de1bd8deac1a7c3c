"""An explanation as text: what is sent, by kind and by line, why, and what to change."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from gshard.explanation.costs import LineCost
from gshard.explanation.findings import EXPLAINED, Findings
from gshard.explanation.names import shape
from gshard.explanation.subject import Subject
from gshard.graph.readable import counted, size
from gshard.graph.source import source_of
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import byte_size

_LINES = 12  # of each list: the largest first
_LARGE = 0.02  # a replicated value is named if it takes this share of the arguments


def text(findings: Findings) -> list[str]:
    """All but the changes of annotations, which take time to try."""
    subject = findings.subject
    lines = [findings.about, findings.bounds, findings.sentence]
    if findings.lines:
        lines += ["", "by kind", *_totals(findings.kinds)]
        lines += ["", "by line", *_totals(findings.lines, kinds=True)]
        lines += ["", "why", *_reasons(findings)]
    if subject.conflicts:
        lines += ["", "conflicting splits of the same tensors"]
        lines += [f"  {conflict}" for conflict in conflicts(findings)]
    found = replicated(findings)
    if found:
        lines += ["", "large values that are replicated"]
        lines += [f"  {size(held):>9}  {what}" for what, held in found]
    return lines


def fix_lines(findings: Findings) -> list[str]:
    """The changes of one annotation that send less, each tried."""
    found = findings.search()
    lines = ["what would remove it", *(f"  {fix}" for fix in found.fixes[:3])]
    if found.tried < found.candidates:
        left = counted(found.candidates - found.tried, "change")
        lines.append(f"  {left} not tried yet: explain(seconds=...) or --budget give time")
    if not found.fixes and found.tried:
        lines.append(f"  none of the {found.tried:,} changes of one annotation saves 1% of them")
    return lines


def _totals(costs: Sequence[LineCost], kinds: bool = False) -> Iterator[str]:
    for cost in costs[:_LINES]:
        more = f"  {cost.kinds}" if kinds else ""
        yield (
            f"  {size(cost.sent):>9}  x {cost.runs:<5}  {cost.shown_seconds:>9}  {cost.name}{more}"
        )
    if len(costs) > _LINES:
        yield f"  and {len(costs) - _LINES} more"


def _reasons(findings: Findings) -> Iterator[str]:
    """For the costliest lines: which splits meet there, and who asked for them."""
    for cost in findings.lines[:EXPLAINED]:
        yield f"  {cost.name}: {cost.values[0].kind} of {size(cost.values[0].total_bytes)}"
        yield f"    {findings.why(cost)}"
    for name, links in findings.chains.items():
        shown = links if len(links) <= 5 else [*links[:2], "...", *links[-2:]]
        yield f"  {name}: {' -> '.join(shown)}"


def conflicts(findings: Findings) -> list[str]:
    """What was decided about conflicting splits, in the names of the tensors that are annotated."""
    named: dict[tuple[str, str], dict[str, None]] = {}
    for eqn in findings.subject.annotations:
        var = eqn.outvars[0]
        named.setdefault((shape(var), f" ({source_of(eqn)})"), {}).setdefault(
            findings.names.value(var)
        )
    found = "\n".join(map(str, findings.subject.conflicts))
    for (known, place), (first, *others) in named.items():
        more = f" and {len(others)} more" if others else ""
        found = found.replace(f"of {known}{place}", f"of {first}{more}{place}")
    return list(dict.fromkeys(found.splitlines()))


def describe(sharding: Sharding, dims: Sequence[str] = ()) -> str:
    """A sharding in words, with names for the dims where the code has some."""
    parts = [
        f"{name or f'dim {d}'} by {s.tiles}"
        for (d, s), name in itertools.zip_longest(enumerate(sharding.splits), dims)
        if s
    ]
    return "split: " + ", ".join(parts) if parts else "replicated"


def replicated(findings: Findings) -> list[tuple[str, int]]:
    """Large arguments and results of operators that every device has all of, and their bytes."""
    subject = findings.subject
    if subject.num_devices == 1:
        return []
    total = sum(_local_bytes(subject, v) for v in subject.flat.jaxpr.invars) or 1
    arguments = dict.fromkeys(subject.flat.jaxpr.invars, "an argument")
    made = {v: source_of(e) for e in subject.equations for v in e.outvars}
    found: dict[str, int] = {}
    for var, where in {**arguments, **made}.items():
        sharding = subject.sharding(var)
        if sharding is not None and sharding.is_replicated and not sharding.manual:
            here = _local_bytes(subject, var)
            if here >= max(_LARGE * total, 2**16):
                name = findings.names.name(var)
                what = f"{name} {shape(var)}".lstrip() + f"  {where}"
                found[what] = max(here, found.get(what, 0))
    return sorted(found.items(), key=lambda item: -item[1])[:_LINES]


def _local_bytes(subject: Subject, var: Any) -> int:
    sharding = subject.sharding(var)
    if sharding is None or not hasattr(var.aval, "shape"):
        return 0
    return byte_size(sharding.local_shape(var.aval.shape), var.aval.dtype)
