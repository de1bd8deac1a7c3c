"""The same gathering on a Ray cluster: Ray Data deals out the units and the languages.

Each is processed by the same functions as on one machine, which do not depend on Ray, so the corpus
is the same, bit for bit. Its folder must be on a file system that all nodes share.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import ray
import ray.data

from gshard.mt.launch import ray_cluster

T = TypeVar("T")
R = TypeVar("R")


def connect() -> None:
    """Join the cluster that `RAY_ADDRESS` names, or start one here."""
    ray_cluster.connect(os.environ.get("RAY_ADDRESS"))
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)


def on_ray(work: Callable[[T], R], items: Sequence[T], workers: int) -> Iterator[tuple[T, R]]:
    """Each item with its result, as they come; so many `workers`, or one for each CPU."""

    def worked(row: dict[str, Any]) -> dict[str, Any]:
        result = work(pickle.loads(row["item"]))
        return {"number": row["number"], "result": pickle.dumps(result)}

    rows = [{"number": i, "item": pickle.dumps(item)} for i, item in enumerate(items)]
    waiting = ray.data.from_items(rows, override_num_blocks=len(rows))
    done = waiting.map(worked, num_cpus=1, compute=ray.data.TaskPoolStrategy(workers or None))
    for row in done.iter_rows():
        yield items[row["number"]], pickle.loads(row["result"])
