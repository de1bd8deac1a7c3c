"""Problems of the ASPLOS/EuroSys 2025 contest on intra-operator parallelism, from the command line.

    python -m benchmarks.contest FILE.json.gz --seconds 60

prints one line of JSON: `cost`, `bound`, `seconds` of wall time, `cpu_seconds`, and whether the
answer is `feasible`, that is, within the memory limit.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gshard.autosharding.budget import PROGRESS
from gshard.autosharding.solver import solve
from gshard.autosharding.solver.problem import (
    FORBIDDEN,
    Floats,
    MemoryModel,
    NoAnswerError,
    Problem,
    unite,
)


def read_contest(path: str | Path) -> Problem:
    """A problem in the format of the ASPLOS/EuroSys 2025 contest (`.json` or `.json.gz`)."""
    path = Path(path)
    raw = path.read_bytes()
    if path.suffix == ".gz":
        raw = gzip.decompress(raw)
    return from_contest(json.loads(raw)["problem"])


def from_contest(data: dict[str, Any]) -> Problem:
    """The contest's problem from its parsed JSON. Costs of 1e18 and above are forbidden."""
    costs = [_costs(c) for c in data["nodes"]["costs"]]
    pairs = []
    for (first, second), flat in zip(data["edges"]["nodes"], data["edges"]["costs"], strict=True):
        shape = len(costs[first]), len(costs[second])
        pairs.append((first, second, _costs(flat).reshape(shape)))
    edges = unite(pairs, costs)
    usages, intervals = data["nodes"]["usages"], data["nodes"]["intervals"]
    holdings = [
        (node, start, stop, usage)
        for node, ((start, stop), usage) in enumerate(zip(intervals, usages, strict=True))
    ]
    length = max((stop for _, stop in intervals), default=0)
    limit = np.full(length, float(data["usage_limit"]))
    return Problem(tuple(costs), tuple(edges), MemoryModel.of(holdings, limit))


def _costs(values: list[int]) -> Floats:
    array = np.array(values, dtype=np.float64)
    array[array >= 1e18] = FORBIDDEN
    return array


def main(arguments: Sequence[str] | None = None) -> None:
    """Solve one file and print one line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.contest")
    parser.add_argument("file", help="a problem, .json or .json.gz")
    parser.add_argument("--seconds", type=float, default=60.0, help="limit of wall time")
    parser.add_argument("--verbose", action="store_true", help="each answer, on standard error")
    given = parser.parse_args(arguments)
    began, cpu = time.monotonic(), time.process_time()
    try:
        problem = read_contest(given.file)
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        sys.exit(f"contest: {given.file} is no problem of the contest: {error!r}")
    if given.verbose:
        logging.basicConfig(format="%(relativeCreated)d ms: %(message)s")
        PROGRESS.setLevel(logging.DEBUG)
    try:
        result = solve(problem, given.seconds - (time.monotonic() - began))
    except NoAnswerError as error:
        sys.exit(f"contest: {given.file}: {error}")
    feasible = result.answer is not None and problem.excess(result.answer) <= 0
    line = {
        "cost": _number(result.cost),
        "bound": _number(result.bound),
        "seconds": round(time.monotonic() - began, 2),
        "cpu_seconds": round(time.process_time() - cpu, 2),
        "feasible": feasible,
    }
    print(json.dumps(line))


def _number(value: float) -> float | int | None:
    """A number as JSON has it: whole where it is, none where it is infinite."""
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) else value


if __name__ == "__main__":
    main()
