"""Work on the nodes of a Ray cluster: processes of a training, one on each, and gatherings.

On every node an actor starts the process and watches it from outside; the driver asks the actors.
So it does not matter how a process or a node is lost: an actor that does not answer is a node that
is silent. The units and the languages of a gathering are processed by the same functions as on one
machine, so the corpus is the same, bit for bit. Its folder must be on a file system that all nodes
share.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gshard.errors import UserError
from gshard.mt.launch.local import LocalChild, free_port, member
from gshard.mt.launch.status import Status

T = TypeVar("T")
R = TypeVar("R")
_STARTING = 120.0  # seconds that an actor may take to come up
_ANSWER = 5.0  # seconds that an actor may take to answer
_LOST = -signal.SIGKILL  # the status of a process whose node is gone


def connect(address: str | None = None) -> None:
    """Join the Ray cluster that `address` names, or start one here."""
    if not ray.is_initialized():
        try:
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            raise UserError(f"no Ray cluster: {error}") from None


class Agent:
    """Starts a process on its node and tells about it."""

    def address(self) -> str:
        """Where this node's process can be the coordinator."""
        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # Ray's
        return f"{host}:{free_port(host)}"

    def start(self, command: Sequence[str], more: Mapping[str, str], folder: str) -> None:
        """Start the process in `folder`, if this node has it, as the user did."""
        with contextlib.suppress(OSError):
            os.chdir(folder)
        self._place = tempfile.mkdtemp(prefix="gshard-ray-")
        self._child = LocalChild(command, more, Path(self._place) / "process", quiet=True)

    def look(self) -> tuple[int | None, Status, float, str]:
        """Its exit status, what it says, this node's clock, and its last words once it ended."""
        code = self._child.poll()
        words = self._child.last_words() if code else ""
        return code, self._child.status(), time.monotonic(), words

    def send(self, number: int) -> None:
        """Send it a signal."""
        self._child.send(number)

    def end(self) -> None:
        """End it, and leave nothing of it on this node."""
        self._child.end()
        shutil.rmtree(self._place, ignore_errors=True)


class RayChild:
    """A process on another node, as its actor last reported it."""

    def __init__(self, actor: Any):
        self._actor, self.begun = actor, time.monotonic()
        self._code: int | None = None
        self._status, self._words = Status(), ""

    def poll(self) -> int | None:
        """Its exit status; that of a lost node is SIGKILL's."""
        if self._code is None:
            try:
                code, told, clock, words = ray.get(self._actor.look.remote(), timeout=_ANSWER)
            except ray.exceptions.GetTimeoutError:
                return None  # its silence will be noticed
            except ray.exceptions.RayError:
                self.lose()
                return self._code
            ahead = time.monotonic() - clock  # clocks of other hosts go differently
            if told.seen:
                told = replace(told, seen=told.seen + ahead, since=told.since + ahead)
            self._status = told
            self._code, self._words = code, words
        return self._code

    def lose(self) -> None:
        """From now on its node counts as gone."""
        self._code, self._words = _LOST, "its node is gone"

    def status(self) -> Status:
        """What it says of itself."""
        return self._status

    def send(self, number: int) -> None:
        """Send it a signal."""
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(self._actor.send.remote(number), timeout=_ANSWER)

    def end(self) -> None:
        """End it and its actor."""
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(self._actor.end.remote(), timeout=_ANSWER)
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(self._actor)

    def last_words(self) -> str:
        """The last line of its output."""
        return self._words


class RayCluster:
    """The nodes of a Ray cluster: the one that `address` names, or one that is started here."""

    look = 1.0  # seconds between two looks at the processes

    def __init__(self, address: str | None = None):
        connect(address)

    def nodes(self) -> list[str]:
        """The nodes that are alive."""
        known = ray.nodes()  # type: ignore[no-untyped-call]  # Ray's
        return sorted(node["NodeID"] for node in known if node["Alive"])

    def capacity(self, wanted: int) -> int:
        """One process on each node that is alive."""
        return min(wanted, len(self.nodes()))

    def start(self, command: Sequence[str], count: int, scratch: Path) -> list[RayChild]:
        """Start a process on each of `count` nodes."""
        agents: list[Any] = [
            ray.remote(Agent)
            .options(num_cpus=1, scheduling_strategy=NodeAffinitySchedulingStrategy(node, False))
            .remote()
            for node in self.nodes()[:count]
        ]
        children, index = [RayChild(agent) for agent in agents], 0
        try:
            address = ray.get(agents[0].address.remote(), timeout=_STARTING)
            for index, agent in enumerate(agents):
                started = agent.start.remote(command, member(address, count, index), os.getcwd())
                ray.get(started, timeout=_STARTING)
        except ray.exceptions.RayError:
            children[index].lose()  # a node that was there a moment ago
        return children


def on_ray(work: Callable[[T], R], items: Sequence[T], workers: int) -> Iterator[tuple[T, R]]:
    """Each item with its result, as they come; so many `workers`, or one for each CPU."""
    import ray.data  # PyArrow, which a training does without

    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)

    def worked(row: dict[str, Any]) -> dict[str, Any]:
        result = work(pickle.loads(row["item"]))
        return {"number": row["number"], "result": pickle.dumps(result)}

    rows = [{"number": i, "item": pickle.dumps(item)} for i, item in enumerate(items)]
    waiting = ray.data.from_items(rows, override_num_blocks=len(rows))
    done = waiting.map(worked, num_cpus=1, compute=ray.data.TaskPoolStrategy(workers or None))
    for row in done.iter_rows():
        yield items[row["number"]], pickle.loads(row["result"])
