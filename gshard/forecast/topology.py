"""How devices are connected, and the load of the busiest link when they all send at once.

A collective's time follows from the routes that its messages take, so a device assignment matters.
On a torus or mesh, messages are routed dim by dim, the shorter way round; a switch connects the
devices of a node at one rate and the nodes at another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np

Flows = tuple[np.ndarray, np.ndarray, np.ndarray]  # from device, to device, bytes


@dataclass(frozen=True)
class Torus:
    """Chips in a grid; a dim that `wraps` is a ring, another a line. Devices of a chip share links.

    Device ids run through a chip first, then along the last dim of the grid.
    """

    shape: tuple[int, ...]
    wraps: tuple[bool, ...]
    devices_per_chip: int
    link_bandwidth: float  # bytes per second, in each direction
    hop_seconds: float

    @property
    def devices(self) -> int:
        """The number of devices."""
        return math.prod(self.shape) * self.devices_per_chip

    @property
    def name(self) -> str:
        """Its grid, and whether it wraps."""
        kind = "torus" if all(self.wraps) else "part torus" if any(self.wraps) else "mesh"
        return f"{' x '.join(map(str, self.shape))} {kind}"

    def coordinates(self, devices: np.ndarray) -> np.ndarray:
        """The chip of each device, one row per dim."""
        return np.stack(np.unravel_index(np.asarray(devices) // self.devices_per_chip, self.shape))

    def seconds(self, flows: Flows) -> float:
        """The time until the busiest link has carried its messages, all started at once."""
        source, target, sent = flows
        here, there = self.coordinates(source), self.coordinates(target)
        busiest = 0.0
        for dim, (n, wrap) in enumerate(zip(self.shape, self.wraps, strict=True)):
            # Dims before this one are at the destination, those after it at the source.
            others = [there[d] if d < dim else here[d] for d in range(len(self.shape)) if d != dim]
            sizes = [s for d, s in enumerate(self.shape) if d != dim]
            line = np.ravel_multi_index(others, sizes) if others else np.zeros(len(sent), int)
            forward = (there[dim] - here[dim]) % n
            if wrap:
                share = np.where(forward * 2 == n, 0.5, forward * 2 < n)
            else:
                share = (there[dim] >= here[dim]).astype(float)
            lines = math.prod(sizes)
            up = _load(lines, n, line, here[dim], forward, sent * share)
            down = _load(lines, n, line, there[dim], (n - forward) % n, sent * (1 - share))
            busiest = max(busiest, up, down)
        return busiest / self.link_bandwidth

    def latency(self, source: np.ndarray, target: np.ndarray) -> float:
        """The latency of the message with the longest route."""
        steps = self.coordinates(target) - self.coordinates(source)
        hops = [
            np.minimum(abs(s), n - abs(s)) if wrap else abs(s)
            for s, n, wrap in zip(steps, self.shape, self.wraps, strict=True)
        ]
        return self.hop_seconds * float(np.sum(hops, axis=0).max(initial=0))

    def reach(self, members: np.ndarray) -> int:
        """Hops between the members that are furthest apart."""
        total = 0
        for position, n, wrap in zip(
            self.coordinates(members), self.shape, self.wraps, strict=True
        ):
            extent = int(position.max() - position.min())
            total += min(extent, n // 2) if wrap else extent
        return total


def _load(
    lines: int, n: int, line: np.ndarray, start: np.ndarray, hops: np.ndarray, sent: np.ndarray
) -> float:
    """The largest load of a link, for messages over `hops` links from `start` along `line`."""
    size = 2 * n + 1
    edges = np.bincount(line * size + start, sent, lines * size)
    edges -= np.bincount(line * size + start + hops, sent, lines * size)
    over = np.cumsum(edges.reshape(lines, size), axis=1)
    return float((over[:, :n] + over[:, n : 2 * n]).max(initial=0.0))


@dataclass(frozen=True)
class Switch:
    """Nodes of devices on a switch (NVLink), and an adapter for each device to the other nodes.

    Virtual devices of one process are `single_step`: they meet once for a collective of any kind
    and copy from each other's memory, where devices on a network take one step after the other.
    """

    devices: int
    devices_per_node: int
    inside_bandwidth: float
    outside_bandwidth: float
    inside_seconds: float
    outside_seconds: float
    single_step: bool = False

    @property
    def name(self) -> str:
        """Nodes and their devices."""
        nodes = -(-self.devices // self.devices_per_node)
        return f"{nodes} x {min(self.devices, self.devices_per_node)} on a switch"

    def seconds(self, flows: Flows) -> float:
        """The time until the busiest device has sent and received its messages."""
        source, target, sent = flows
        apart = source // self.devices_per_node != target // self.devices_per_node
        away = source != target
        worst = 0.0
        for chosen, rate in (
            (away & ~apart, self.inside_bandwidth),
            (apart, self.outside_bandwidth),
        ):
            for ends in (source, target):
                load = np.bincount(ends[chosen], sent[chosen], self.devices)
                worst = max(worst, float(load.max(initial=0.0)) / rate)
        return worst

    def latency(self, source: np.ndarray, target: np.ndarray) -> float:
        """The latency of a message to another node, if there is one."""
        apart = source // self.devices_per_node != target // self.devices_per_node
        return self.outside_seconds if apart.any() else self.inside_seconds

    def reach(self, members: np.ndarray) -> int:
        """Levels of switches between the members that are furthest apart, by halving."""
        nodes = len(set((np.asarray(members) // self.devices_per_node).tolist()))
        return 1 + math.ceil(math.log2(nodes))


@dataclass(frozen=True)
class Network:
    """The links of a kind of hardware, for any number of devices."""

    kind: str  # "torus" or "switch"
    dims: int = 2
    wraps_at: int = 0  # a dim is a ring if its length is a multiple of this
    devices_per_chip: int = 1
    link_bandwidth: float = 0.0
    hop_seconds: float = 0.0
    devices_per_node: int = 1
    inside_bandwidth: float = 0.0
    outside_bandwidth: float = 0.0
    inside_seconds: float = 0.0
    outside_seconds: float = 0.0
    single_step: bool = False  # a collective of any kind takes one latency: threads of a process

    def topology(self, devices: int) -> Torus | Switch:
        """The topology of this many devices: on a torus the grid nearest to a square or cube."""
        if self.kind == "switch":
            return Switch(devices, **{f.name: getattr(self, f.name) for f in fields(Switch)[1:]})
        if self.kind != "torus":
            raise ValueError(f"network.kind is {self.kind!r}; allowed are 'torus' and 'switch'")
        shape = squarest(-(-devices // self.devices_per_chip), self.dims)
        return self.torus(shape)

    def torus(self, shape: tuple[int, ...]) -> Torus:
        """A grid of this shape; a dim of two needs no wrap-around."""
        wraps = tuple(bool(self.wraps_at) and n > 2 and n % self.wraps_at == 0 for n in shape)
        return Torus(shape, wraps, self.devices_per_chip, self.link_bandwidth, self.hop_seconds)


def squarest(count: int, dims: int) -> tuple[int, ...]:
    """`count` as a product of `dims` factors, as equal as they come, the smallest first."""
    if dims == 1:
        return (count,)
    side = round(count ** (1 / dims))
    first = max(k for k in range(1, max(side, 1) + 1) if count % k == 0)
    return (first, *squarest(count // first, dims - 1))
