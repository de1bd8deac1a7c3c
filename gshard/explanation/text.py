"""A program explained in text: what moves, by kind and by line, why, and what to change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from gshard.explanation.chains import chain
from gshard.explanation.fixes import fixes
from gshard.explanation.subject import Subject
from gshard.forecast import Forecast
from gshard.forecast.report import duration, size
from gshard.graph.source import source_of
from gshard.moving.inventory import Collective
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import byte_size

_LINES = 12  # of each list: the largest first
_LARGE = 0.02  # a replicated value is named if it takes this share of the arguments
_QUICK = 1500  # equations up to which changes of annotations are tried without being asked


def explain(subject: Subject, forecast: Forecast, try_fixes: bool | None = None) -> str:
    """All of it; `try_fixes` partitions anew for each candidate, by default if that is quick."""
    seconds = _seconds_by_line(subject, forecast)
    lines = [
        f"program for each of {subject.num_devices} devices: {len(subject.collectives)} "
        f"collectives, {size(subject.sent)} sent by each device, "
        f"{duration(sum(seconds.values()))} on {forecast.hardware.name}",
    ]
    if subject.collectives:
        lines += ["", "by kind", *_totals(subject.collectives, lambda c: c.kind)]
        lines += ["", "by line", *_totals(subject.values, lambda c: c.source, seconds)]
        lines += ["", "why", *_reasons(subject)]
        if try_fixes or (try_fixes is None and len(subject.equations) <= _QUICK):
            lines += ["", "what would remove it", *_fix_lines(subject)]
    if subject.conflicts:
        lines += ["", "splits that wanted the same tensors", *_conflicts(subject)]
    lines += _replicated(subject)
    return "\n".join(lines)


def _totals(
    collectives: Sequence[Collective],
    key: Callable[[Collective], str],
    seconds: dict[str, float] | None = None,
) -> Iterator[str]:
    groups: dict[str, list[Collective]] = {}
    for c in collectives:
        groups.setdefault(key(c), []).append(c)
    ranked = sorted(groups.items(), key=lambda item: -sum(c.total_bytes for c in item[1]))
    for name, members in ranked[:_LINES]:
        sent, count = sum(c.total_bytes for c in members), sum(c.count for c in members)
        took = f"  {duration(seconds[name]):>9}" if seconds and name in seconds else ""
        kinds = "" if seconds is None else "  " + ", ".join(sorted({c.kind for c in members}))
        yield f"  {size(sent):>9}  x {count:<5}{took}  {name}{kinds}"
    if len(ranked) > _LINES:
        yield f"  and {len(ranked) - _LINES} more"


def _seconds_by_line(subject: Subject, forecast: Forecast) -> dict[str, float]:
    """The time of the collectives; values that travel together share theirs by their bytes."""
    found: dict[str, float] = {}
    shared = {(c.source, c.reason): c for c in subject.collectives if c.members}
    for t in forecast.operators:
        if t.collective:
            whole = shared.get((t.source, t.reason))
            parts = {t.source: 1.0}
            if whole and whole.bytes:
                parts = {}
                for c in whole.members:
                    parts[c.source] = parts.get(c.source, 0.0) + c.bytes / whole.bytes
            for line, part in parts.items():
                found[line] = found.get(line, 0.0) + part * float(t.total_seconds)
    return found


def _reasons(subject: Subject) -> Iterator[str]:
    """For the largest collectives: how the values at that line lie, and who asked for it."""
    ranked = sorted(subject.values, key=lambda c: -c.total_bytes)
    seen: set[str] = set()
    for c in ranked:
        if c.source in seen or len(seen) == _LINES // 2:
            continue
        seen.add(c.source)
        yield f"  {c.source}: {c.kind} of {size(c.total_bytes)}, {c.reason}"
        yield from _values(subject, c.source)


def _values(subject: Subject, source: str) -> Iterator[str]:
    told: set[str] = set()
    for eqn in subject.equations:
        if source_of(eqn) != source:
            continue
        for atom in (*eqn.invars, *eqn.outvars):
            text = _value(subject, eqn, atom)
            if text and text not in told and len(told) < 6:
                told.add(text)
                yield text


def _value(subject: Subject, eqn: JaxprEqn, atom: Any) -> str | None:
    sharding = subject.sharding(atom)
    if sharding is None or not sharding.splits or byte_size(atom.aval.shape, atom.aval.dtype) < 64:
        return None
    role = "operand" if atom in eqn.invars else "result"
    shape = atom.aval.str_short(short_dtypes=True)
    links = next((chain(subject, atom, d) for d, s in enumerate(sharding.splits) if s), [])
    shown = links if len(links) <= 5 else [*links[:2], None, *links[-2:]]
    way = " <- ".join("..." if link is None else str(link) for link in reversed(shown))
    return f"    {role} of {eqn.primitive.name} {shape} is {describe(sharding)}" + (
        f", from {way}" if way else ""
    )


def describe(sharding: Sharding) -> str:
    """A sharding in words."""
    parts = [f"dim {d} by {s.tiles}" for d, s in enumerate(sharding.splits) if s]
    return "split: " + ", ".join(parts) if parts else "whole on every device"


def _conflicts(subject: Subject) -> Iterator[str]:
    for conflict in subject.conflicts:
        yield f"  {conflict}"


def _fix_lines(subject: Subject) -> Iterator[str]:
    found = fixes(subject)
    for fix in found[:3]:
        yield f"  {fix}"
    if not found:
        yield "  no change of a single annotation sends less"


def _replicated(subject: Subject) -> list[str]:
    """Large arguments and results of operators that every device holds whole."""
    total = sum(_local_bytes(subject, v) for v in subject.flat.jaxpr.invars) or 1
    found: dict[tuple[str, str], int] = {}
    if subject.num_devices == 1:
        return []
    values = [(v, "an argument") for v in subject.flat.jaxpr.invars]
    values += [(v, source_of(e)) for e in subject.equations for v in e.outvars]
    for var, where in values:
        sharding = subject.sharding(var)
        if sharding is not None and sharding.is_replicated and not sharding.manual:
            here = _local_bytes(subject, var)
            if here >= max(_LARGE * total, 2**16):
                shape = var.aval.str_short(short_dtypes=True)
                found[shape, where] = max(here, found.get((shape, where), 0))
    ranked = sorted(found.items(), key=lambda item: -item[1])[:_LINES]
    rows = [f"  {size(b):>9}  {shape}  {where}" for (shape, where), b in ranked]
    return ["", "large values that every device holds whole", *rows] if rows else []


def _local_bytes(subject: Subject, var: Any) -> int:
    sharding = subject.sharding(var)
    if sharding is None or not hasattr(var.aval, "shape"):
        return 0
    return math.prod(sharding.local_shape(var.aval.shape)) * byte_size((), var.aval.dtype)
