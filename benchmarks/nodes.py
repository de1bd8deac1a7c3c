"""A training on three nodes of a Ray cluster loses one of them, and gets it back.

    python -m benchmarks.nodes

Starts a cluster of three nodes on this machine, trains a small model on made-up text by `gshard
train --ray --hosts 3`, takes a node away, and adds one when there are steps without it. Prints when
everything happened, as the command tells it, and how long each change took until the next step.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.small_run import prepare
from benchmarks.soak import losses, newest_checkpoint, steps_done

STEPS = 4  # to be made in each part, at least
PATIENCE = 900.0  # seconds for any of them


class Watched:
    """The command, what it says and when."""

    def __init__(self, config: Path, run: Path, address: str):
        self.begin = time.monotonic()
        self.run = run
        self.said: list[str] = []
        self._known: int | None = None  # the journal's file, of the last start
        words = ["train", str(config), "--out", str(run), "--ray", "--hosts", "3", "--least", "1"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gshard.cli", *words],
            env={**os.environ, "RAY_ADDRESS": address},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line.strip())
            if line.startswith("ray:"):
                self.tell(line.removeprefix("ray: ").strip())

    def _journal(self) -> int | None:
        path = self.run / "metrics.jsonl"
        return path.stat().st_ino if path.exists() else None

    def tell(self, text: str) -> None:
        """Print a line with the seconds since the start."""
        print(f"{time.monotonic() - self.begin:7.1f} s  {text}", flush=True)

    def until(self, true: Callable[[], bool]) -> float:
        """Wait until something is true, and return when that was; an error if it never will be."""
        deadline = time.monotonic() + PATIENCE
        while not true():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("it did not come to that:\n" + "\n".join(self.said[-20:]))
            time.sleep(0.1)
        return time.monotonic()

    def steps(self, after: float, what: str) -> None:
        """Wait for some more steps, and tell how long the first one took."""
        # A run that goes on writes its journal anew, without the steps that are repeated.
        self.until(lambda: self._journal() not in (None, self._known))
        self._known = self._journal()
        begun = steps_done(self.run)
        first = self.until(lambda: steps_done(self.run) > begun)
        self.tell(f"step {steps_done(self.run)}, {first - after:.1f} s after {what}")
        self.until(lambda: newest_checkpoint(self.run) > begun + STEPS)


def cluster() -> Any:
    """Three nodes with a core each, on this machine; a busy one is not taken for dead."""
    from ray.cluster_utils import Cluster

    patient = {"health_check_period_ms": 1000, "health_check_failure_threshold": 20}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "_system_config": patient})
    made.add_node(num_cpus=1)
    return made


def main() -> None:
    """Print what happens."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--folder", type=Path, help="keep the run there")
    given = options.parse_args()
    nodes = cluster()
    third = nodes.add_node(num_cpus=1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch)
        config = prepare(folder, 1000, 0)
        watched = Watched(config, folder / "run", nodes.address)
        try:
            watched.steps(watched.begin, "the start with three nodes")
            nodes.remove_node(third, allow_graceful=False)
            watched.tell("a node is taken away")
            watched.steps(time.monotonic(), "that, with two nodes")
            nodes.add_node(num_cpus=1)
            watched.tell("a node is added")
            watched.until(lambda: any("there is room for 3" in line for line in watched.said))
            watched.steps(time.monotonic(), "all had been told to start again, with three nodes")
            watched.process.terminate()  # all save
            status = watched.process.wait(PATIENCE)
        finally:
            watched.process.kill()
            nodes.shutdown()
        steps = [step for kind, step in losses(folder / "run") if kind == "train"]
        whole = steps == list(range(1, len(steps) + 1))
        print(f"exit status {status}; steps 1 to {len(steps)} in the journal, each once: {whole}")


if __name__ == "__main__":
    main()
