"""The time of a collective: its messages, phase by phase, on the links of a topology.

The paper's section 5.3 follows from the routes: AllReduce takes O(1) time in the number of devices,
AllToAll O(sqrt(D)) on a 2-D torus, AllGather of a fixed input O(D), a CollectivePermute between
neighbours O(1).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from gshard.forecast.topology import Flows, Switch, Torus

Topology = Torus | Switch
Groups = tuple[tuple[int, ...], ...]  # () for one group of all devices in their order
Rings = list[np.ndarray]  # each an array of device ids in the order of the ring

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute")


def collective_seconds(
    topology: Topology, kind: str, size: int, groups: Groups = (), pairs: Groups = ()
) -> float:
    """The time of a collective on an operand of `size` bytes on each device.

    All groups take part at once. A permute has (source, destination) `pairs` instead.
    """
    return sum(collective_terms(topology, kind, size, groups, pairs))


def collective_terms(
    topology: Topology, kind: str, size: int, groups: Groups = (), pairs: Groups = ()
) -> tuple[float, float]:
    """The two terms of that time: bandwidth and latency."""
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; allowed are {', '.join(KINDS)}")
    if kind == "collective_permute":
        slope, latency = _permute(topology, pairs)
        return size * slope, latency
    members = len(groups[0]) if groups else topology.devices
    if members == 1:
        return 0.0, 0.0
    if kind == "all_to_all":
        slope, latency = _all_to_all(topology, groups)
        return size * slope, latency
    if kind == "all_gather":  # a reduce-scatter of the result, reversed
        size *= members
    times = 2 if kind == "all_reduce" else 1
    waits = 1 if _single_step(topology) else times
    ways = [(times * size * slope, waits * wait) for slope, wait in _ways(topology, groups)]
    return min(ways, key=sum)


@functools.lru_cache(maxsize=4096)
def reach(topology: Topology, groups: Groups) -> int:
    """Hops across the widest of the groups."""
    return max(topology.reach(row) for row in _rows(topology, groups))


@functools.lru_cache(maxsize=4096)
def _permute(topology: Topology, pairs: Groups) -> tuple[float, float]:
    source, target = np.array(pairs).T
    flows: Flows = (source, target, np.ones(len(source)))
    return topology.seconds(flows), topology.latency(source, target)


@functools.lru_cache(maxsize=4096)
def _all_to_all(topology: Topology, groups: Groups) -> tuple[float, float]:
    """Seconds per byte that each device holds, and the latency."""
    rows = _rows(topology, groups)
    members = rows.shape[1]
    sources, targets, sent = [], [], []
    for row in rows:
        ends, count = _ends(topology, row)
        sources.append(np.repeat(ends, len(ends)))
        targets.append(np.tile(ends, len(ends)))
        sent.append(np.outer(count, count).ravel() / members)
    source, target = np.concatenate(sources), np.concatenate(targets)
    flows: Flows = (source, target, np.concatenate(sent))
    return topology.seconds(flows), topology.latency(source, target)


def _ends(topology: Topology, row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first device of each chip, and how many members share its links."""
    if isinstance(topology, Switch):
        return row, np.ones(len(row))
    chips, count = np.unique(row // topology.devices_per_chip, return_counts=True)
    return chips * topology.devices_per_chip, count


@functools.lru_cache(maxsize=4096)
def _ways(topology: Topology, groups: Groups) -> tuple[tuple[float, float], ...]:
    """For every algorithm for a reduce-scatter: seconds per byte of the operand, and the latency.

    Either one ring through all members, or hierarchical phases: within nodes, then between them,
    each on the part of the operand that the previous phase left on a device. On a torus the operand
    is also split into one part per dim; the parts pass through the dims in different orders, which
    keeps all links busy.
    """
    rows = _rows(topology, groups)
    ways = [_ring(topology, list(rows))]
    phases = _phases(topology, rows)
    if not phases:
        return tuple(ways)
    found = [_ring(topology, rings) for rings in phases]
    sizes = [len(rings[0]) for rings in phases]
    parts = np.cumprod([1.0, *[1.0 / n for n in sizes]])
    latency = sum(wait for _, wait in found)
    ways.append(
        (sum(part * slope for part, (slope, _) in zip(parts, found, strict=False)), latency)
    )
    if isinstance(topology, Torus):
        chips = [set((ring // topology.devices_per_chip).tolist()) for ring in phases[0]]
        first = int(all(len(chip) == 1 for chip in chips))
        if len(phases) > first + 1:
            left = parts[first] - parts[-1]
            full = max(
                slope * n / (n - 1)
                for (slope, _), n in zip(found[first:], sizes[first:], strict=True)
            )
            ways.append((full * left / (len(phases) - first), latency))
    return tuple(ways)


def _ring(topology: Topology, rings: Rings) -> tuple[float, float]:
    """A bidirectional reduce-scatter around each ring."""
    source = np.concatenate(rings)
    after = np.concatenate([np.roll(ring, -1) for ring in rings])
    half = np.full(2 * len(source), 0.5)
    flows: Flows = (np.concatenate([source, after]), np.concatenate([after, source]), half)
    members = len(rings[0])
    slope = topology.seconds(flows) * (members - 1) / members
    return slope, _steps(topology, members) * topology.latency(source, after)


def _steps(topology: Topology, members: int) -> int:
    """The steps of a reduce-scatter, each of which takes a latency."""
    if _single_step(topology):
        return 1
    # Behind a switch all devices are one hop apart: recursive halving takes fewer steps.
    return math.ceil(math.log2(members)) if isinstance(topology, Switch) else members // 2


def _single_step(topology: Topology) -> bool:
    return isinstance(topology, Switch) and topology.single_step


def _phases(topology: Topology, rows: np.ndarray) -> list[Rings]:
    """Rings within nodes and then between; or along each dim of a group that is a box."""
    if isinstance(topology, Switch):
        return _by_level([row // topology.devices_per_node for row in rows], rows)
    coordinates = [topology.coordinates(row) for row in rows]
    inside = _by_level([np.ravel_multi_index(c, topology.shape) for c in coordinates], rows)
    phases = inside[:1] if inside else []
    for dim in range(len(topology.shape)):
        rings: Rings = []
        for row, c in zip(rows, coordinates, strict=True):
            key = np.stack([*np.delete(c, dim, axis=0), row % topology.devices_per_chip])
            rings += _lines(row, key, c[dim] if topology.wraps[dim] else _folded(c[dim]))
        lengths = {len(r) for r in rings}
        if len(lengths) != 1:
            return []  # not a box: its lines have different lengths
        if lengths != {1}:
            phases.append(rings)
    members = int(np.prod([len(r[0]) for r in phases])) if phases else 1
    return phases if members == rows.shape[1] else []


def _by_level(nodes: list[np.ndarray], rows: np.ndarray) -> list[Rings]:
    """Rings within each node, and rings of the members with one rank in their nodes."""
    inside: Rings = []
    between: Rings = []
    for row, node in zip(rows, nodes, strict=True):
        within = _lines(row, node[None], row)
        inside += within
        if len({len(r) for r in within}) != 1:
            return []
        between += list(np.stack(within).T)
    if len(inside[0]) == 1:
        return []
    return [inside, between] if len(between[0]) > 1 else [inside]


def _lines(row: np.ndarray, key: np.ndarray, order: np.ndarray) -> Rings:
    """The members with equal columns of `key`, each line sorted by `order`."""
    _, number = np.unique(key, axis=1, return_inverse=True)
    number = number.ravel()
    by = np.lexsort((order, number))
    return np.split(row[by], np.flatnonzero(np.diff(number[by])) + 1)


def _folded(position: np.ndarray) -> np.ndarray:
    """An order in which a line becomes a ring of hops over two: 0, 2, 4, ..., 5, 3, 1."""
    return np.where(position % 2, 2 * position.max() - position, position)


def _rows(topology: Topology, groups: Groups | Sequence[Sequence[int]]) -> np.ndarray:
    if not groups:
        return np.arange(topology.devices)[None]
    size = max(map(len, groups))  # devices that take no part are in shorter groups of their own
    return np.array([g for g in groups if len(g) == size])
