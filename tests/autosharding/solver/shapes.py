"""Instances in the format of the contest: chains, stars, dense cores, and a little of each."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

SHAPES = ("chain", "star", "core", "mixed")


def instance(
    shape: str, nodes: int, strategies: int, tightness: float, seed: int
) -> dict[str, Any]:
    """Nodes of 1 to `strategies` strategies, of which those that hold less cost more.

    The limit is `tightness` times the peak when each node holds the least that it can: from 1 on
    there is an answer within it. Some nodes hold a large share of the limit.
    """
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, strategies + 1, nodes)
    large = np.where(rng.random(nodes) < 0.1, 30, 1)
    usages, costs, intervals = [], [], []
    for node, size in enumerate(sizes):
        usage = large[node] * rng.integers(1, 100, size)
        costs.append((large[node] * 3000 // usage + rng.integers(0, 20, size)).tolist())
        usages.append(usage.tolist())
        start = max(0, node - int(rng.integers(0, 5)))
        long = rng.random() < 0.2
        intervals.append([start, node + (nodes if long else int(rng.integers(0, 10)))])
    profile = np.zeros(2 * nodes + 10)
    for (start, stop), usage in zip(intervals, usages, strict=True):
        profile[start:stop] += min(usage)
    tables = []
    pairs = _edges(shape, nodes, rng)
    for first, second in pairs:
        table = rng.integers(0, 60, (sizes[first], sizes[second]))
        table[rng.random(table.shape) < 0.3] = 0
        tables.append(table.ravel().tolist())
    return {
        "name": f"{shape}-{nodes}-{seed}",
        "nodes": {"costs": costs, "usages": usages, "intervals": intervals},
        "edges": {"nodes": pairs, "costs": tables},
        "usage_limit": int(np.ceil(tightness * profile.max())),
    }


def _edges(shape: str, nodes: int, rng: np.random.Generator) -> list[list[int]]:
    chain = [[node, node + 1] for node in range(nodes - 1)]
    star = [[0, node] for node in range(1, nodes)]
    core = list(range(nodes))[:: max(nodes // 8, 1)]
    dense = [list(pair) for pair in itertools.combinations(core, 2)]
    if shape == "chain":
        return chain
    if shape == "star":
        return star
    if shape == "core":
        return dense + [[int(rng.choice(core)), n] for n in range(nodes) if n not in core]
    others = [sorted(rng.choice(nodes, 2, replace=False).tolist()) for _ in range(nodes // 2)]
    return chain + star[:: max(nodes // 20, 1)] + dense + others
