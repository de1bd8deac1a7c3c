"""The collectives of a program that XLA partitioned, read from its HLO text.

Both partitioners are measured alike: bytes that one device sends, times the trip counts of the
enclosing loops.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator

from gshard.graph.reason import Reason
from gshard.moving.costs import sent_bytes
from gshard.moving.inventory import Collective

_LINE = re.compile(
    r"= (?P<type>\(.*?\)|\S+) "
    r"(?P<op>all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)
_SHAPE = re.compile(r"(?P<dtype>[a-z]+\d*(?:e\d+m\d+\w*)?)\[(?P<dims>[\d,]*)\]")

_XLA = Reason("step", "XLA")  # HLO does not say why


def collectives_of_hlo(text: str, num_devices: int) -> Iterator[Collective]:
    """The collectives of a compiled program, with the trip counts of their loops."""
    runs = _trip_counts(text)
    for computation, line in _lines(text):
        found = _LINE.search(line)
        if not found:
            continue
        kind = found["op"].replace("-", "_")
        shapes = [(m["dtype"], m["dims"]) for m in _SHAPE.finditer(found["type"])]
        size = sum(_bytes(dtype, dims) for dtype, dims in shapes)
        if found["op"] + "-start(" in line and len(shapes) > 1:
            size //= 2  # the type has both operand and result
        members = _group_size(line, num_devices)
        # The type is that of the result.
        operand = {"all_gather": size // members, "reduce_scatter": size * members}.get(kind, size)
        sent = sent_bytes(kind, operand, members)
        where = re.search(r'source_file="([^"]*)" source_line=(\d+)', line)
        source = f"{where[1]}:{where[2]}" if where else "unknown"
        if sent:
            yield Collective(
                kind, sent, runs.get(computation, 1), members, shapes[0][0], source, _XLA
            )


def _lines(text: str) -> Iterator[tuple[str, str]]:
    """(computation, line) for every line of the program."""
    computation = ""
    for line in text.splitlines():
        head = re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if head:
            computation = head[1]
        yield computation, line


def _trip_counts(text: str) -> dict[str, int]:
    """How often each computation runs: the product of its loops' trip counts."""
    calls: dict[str, list[tuple[str, int]]] = {}
    for computation, line in _lines(text):
        trips = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)
        for kind, callee in re.findall(r"(body|calls|to_apply|condition)=%?([\w.\-]+)", line):
            times = int(trips[1]) if trips and kind == "body" else 1
            calls.setdefault(callee, []).append((computation, times))

    @functools.cache
    def runs(computation: str) -> int:
        callers = calls.get(computation, [])
        return sum(runs(caller) * times for caller, times in callers) if callers else 1

    return {callee: runs(callee) for callee in calls}


def _group_size(line: str, num_devices: int) -> int:
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    if listed:
        return len(listed[1].split(","))
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]", line)
    if iota:
        return int(iota[2])
    pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", line)
    if pairs:
        return len(set(re.findall(r"\d+", pairs[1])))
    return num_devices


def _bytes(dtype: str, dims: str) -> int:
    count = math.prod(int(d) for d in dims.split(",")) if dims else 1
    width = 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])  # type: ignore[index]
    return count * max(width // 8, 1)
