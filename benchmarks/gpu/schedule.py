"""Which communication a compiled program hides behind products, read off its schedule.

XLA's text of a scheduled program lists instructions in the order in which they are started. A
collective that has a start and a done runs beside whatever is listed between the two. It counts as
hidden if a matrix product (or a kernel that has some) is among these, and as exposed otherwise.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gshard.explanation.hlo import collectives_of_hlo

_PRODUCT = re.compile(r'custom_call_target="[^"]*(?:cublas|cudnn)|__triton_gemm| dot\(|name=flash_')
_START = re.compile(r"%?(\S+) = .*?\b(?:all|reduce|collective)-[a-z-]+-start\(")
_DONE = re.compile(r"\b(?:all|reduce|collective)-[a-z-]+-done\((?:[^%)]*)%?([^),\s]+)")
_COMPUTATION = re.compile(r"^\s*(?:ENTRY )?%?(\S+) \(.*\{$")
_CALLS = re.compile(r"\bfusion\(.*\bcalls=%?([^,\s]+)")
_KERNEL = re.compile(r'custom_call_target="[^"]*(?:triton|mosaic)[^"]*"', re.IGNORECASE)


@dataclass(frozen=True)
class Scheduled:
    """A collective of a program: what one device sends by it, and whether that is hidden."""

    kind: str
    bytes: int
    hidden: bool


def scheduled(text: str, devices: int) -> list[Scheduled]:
    """The collectives of a scheduled program in its order; loops count once."""
    found: list[Scheduled] = []
    running: dict[str, int] = {}  # by the name of its start: its place in `found`
    fused = _fused_products(text)
    for line in text.splitlines():
        if done := _DONE.search(line):
            running.pop(done[1], None)
            continue
        called = _CALLS.search(line)
        if _PRODUCT.search(line) or (called and called[1] in fused):
            for place in running.values():
                found[place] = Scheduled(found[place].kind, found[place].bytes, True)
        for collective in collectives_of_hlo(line, devices):
            if started := _START.search(line):
                running[started[1]] = len(found)
            found.append(Scheduled(collective.kind, collective.bytes, False))
    return found


def _fused_products(text: str) -> set[str]:
    """The computations with a product: a fusion that reads or writes slices in place has one."""
    found, name = set(), ""
    for line in text.splitlines():
        if begin := _COMPUTATION.match(line):
            name = begin[1]
        elif _PRODUCT.search(line):
            found.add(name)
    return found


def exposed_gb(text: str, devices: int, kind: str | None = None) -> tuple[float, float]:
    """10^9 bytes that a device sends, and of those what no product hides; of one kind or all."""
    chosen = [c for c in scheduled(text, devices) if kind in (None, c.kind)]
    return sum(c.bytes for c in chosen) / 1e9, sum(c.bytes for c in chosen if not c.hidden) / 1e9


def kernels(text: str) -> int:
    """How many calls of Pallas kernels a compiled program has."""
    return len(_KERNEL.findall(text))
