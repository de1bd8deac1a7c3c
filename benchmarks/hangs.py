"""`python -m benchmarks.hangs`: planted hangs, and whether the right process and line are named.

Processes on this machine, one device each, run the same programs over loopback, with GSHARD_RECORD.
In each round one of them is made to hang the others: it is stopped or killed at a collective, does
not make a call that the others make, or calls another program. Then the files that the processes
keep have to say who it was, and at which collective and line the others wait.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gshard import recording

KINDS = ("stop", "stop inside", "skip", "die", "die inside", "branch")
ENDING = ("die", "die inside", "branch")  # after which the processes cannot go on
STILL = 2.0  # seconds without a move
SECONDS = 30.0  # in which a hang has to be named


@dataclass(frozen=True)
class Hang:
    """One of `KINDS`, by one process, at a collective of a call, counted from 0."""

    kind: str
    process: int
    at: int


# ---------------------------------------------------------------- what the processes run


def step(w, x):
    """Four collectives, two of them three times, in a loop; each needs the one before."""
    import jax
    import jax.numpy as jnp

    import gshard

    x = gshard.split(x, 1, len(jax.devices()))

    def layer(h, w):
        h = jnp.tanh(h @ w)
        return h, h.sum()

    h, sums = jax.lax.scan(layer, x, w)
    best = jnp.max(h, axis=1, keepdims=True)
    return (h - best) @ w[0], sums


def other(w, x):
    """What a process runs that took another branch."""
    import jax
    import jax.numpy as jnp

    import gshard

    x = gshard.split(x, 1, len(jax.devices()))
    return jnp.sort(x, axis=1) + x @ w[1]


COLLECTIVES = 8  # that one call of `step` enters


class Worker:
    """A process that runs the commands it receives through a pipe."""

    def __init__(
        self, index: int, count: int, address: str, folder: Path, words: int, answers: int
    ):
        os.environ[recording.VARIABLE] = str(folder)
        import jax
        import numpy as np

        import gshard

        jax.config.update("jax_num_cpu_devices", 1)
        jax.config.update("jax_enable_preemption_service", False)
        jax.distributed.initialize(
            address, count, index, cluster_detection_method="deactivate",
            initialization_timeout=300, heartbeat_timeout_seconds=3600,
        )  # fmt: skip
        rng = np.random.default_rng(0)
        self._arguments = [rng.normal(size=n).astype("f") for n in ((3, 8, 8), (16, 8))]
        self._programs = {f.__name__: gshard.jit(f) for f in (step, other)}
        self._words, self._answers = os.fdopen(words), os.fdopen(answers, "w")
        self._plant: tuple[str, int] | None = None
        self._entered = 0
        enter = recording.Recorder.enter

        def entered(recorder: recording.Recorder, *where: Any) -> None:
            planted, self._entered = self._plant, self._entered + 1
            if planted is None or self._entered - 1 != planted[1]:
                enter(recorder, *where)
                return
            if planted[0].endswith("inside"):
                enter(recorder, *where)
            dies = planted[0].startswith("die")
            # To this thread: another one may take its time, and this one would go on until then.
            signal.pthread_kill(threading.get_ident(), signal.SIGKILL if dies else signal.SIGSTOP)
            if not planted[0].endswith("inside"):
                enter(recorder, *where)

        # The hang is planted in the class: programs hold their recorders already.
        recording.Recorder.enter = entered  # type: ignore[method-assign]

    def run(self) -> None:
        """Obey until the pipe is closed."""
        import jax

        for line in self._words:
            order = json.loads(line)
            self._plant, self._entered = order.get("plant"), 0
            jax.block_until_ready(self._programs[order["call"]](*self._arguments))
            print("done", file=self._answers, flush=True)


# ---------------------------------------------------------------- who plants the hangs


class Group:
    """Processes that run together until a hang ends them."""

    def __init__(self, count: int, folder: Path):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.folder, self.count = folder, count
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        self._orders, self._answers, self.pids = [], [], []
        for index in range(count):
            words, orders = os.pipe()
            answers, replies = os.pipe()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # JAX warns of forks: no device is used yet
                pid = os.fork()
            if not pid:
                _worker(index, count, address, folder, words, replies)
            os.close(words)
            os.close(replies)
            self._orders.append(os.fdopen(orders, "w"))
            self._answers.append(os.fdopen(answers))
            self.pids.append(pid)
        for program in ("other", "step"):  # compiled before anything is planted
            self.call(program, range(count))
            self.wait(range(count))

    def call(self, program: str, processes: Sequence[int], plant: Any = None) -> None:
        """Let some processes call a program; a `plant` is for one of them."""
        for index in processes:
            order = {"call": program} | ({"plant": plant[1]} if plant and plant[0] == index else {})
            print(json.dumps(order), file=self._orders[index], flush=True)

    def wait(self, processes: Sequence[int]) -> None:
        """Until some processes have made their call."""
        for index in processes:
            if not self._answers[index].readline():
                raise RuntimeError(f"process {index} has ended")

    def stand_still(self) -> None:
        """Until no process has entered a collective for a while."""
        before, since = None, time.monotonic()
        while time.monotonic() - since < STILL:
            now = [(p.process, p.entered) for p in recording.read(self.folder)]
            if now != before:
                before, since = now, time.monotonic()
            time.sleep(0.1)

    def end(self) -> None:
        """Kill all that are left."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _worker(index: int, count: int, address: str, folder: Path, words: int, replies: int) -> None:
    log = os.open(folder / f"{index}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        Worker(index, count, address, folder, words, replies).run()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        time.sleep(3600)  # what it kept is to be read: it waits to be killed
    os._exit(0)


def planted(group: Group, hang: Hang) -> tuple[bool, float, str]:
    """Whether a hang is named right, after how many seconds, and in which words."""
    others = [i for i in range(group.count) if i != hang.process]
    begun = time.monotonic()
    if hang.kind == "skip":
        group.call("step", others)
    elif hang.kind == "branch":
        group.call("step", others)
        group.call("other", [hang.process])
    else:
        group.call("step", range(group.count), (hang.process, (hang.kind, hang.at)))
    group.stand_still()
    found = recording.standstill(recording.read(group.folder))
    took = time.monotonic() - begun
    right = found is not None and _is_right(found, hang)
    if hang.kind == "skip":
        group.call("step", [hang.process])
    elif hang.kind.startswith("stop"):
        os.kill(group.pids[hang.process], signal.SIGCONT)
    if hang.kind not in ENDING:
        group.wait(range(group.count))
    return right, took, str(found)


def _is_right(found: recording.Standstill, hang: Hang) -> bool:
    how = {"skip": recording.BEHIND, "branch": recording.ELSEWHERE}.get(hang.kind, "")
    how = how or (recording.GONE if hang.kind.startswith("die") else recording.STOPPED)
    number = 0 if hang.kind in ("skip", "branch") else _number(hang.at)
    last = {"skip": 3, "branch": 0}.get(hang.kind)
    if last is None:
        last = number if hang.kind.endswith("inside") else _number(hang.at - 1)
    where, instead = found.where, found.instead
    return (
        found.how == how
        and [p.process for p in found.culprits] == [hang.process]
        and where is not None
        and (where.program, where.number) == ("step", number)
        and Path(where.source.rpartition(":")[0]).name == Path(__file__).name
        and instead is not None
        and instead.number == last
        and instead.program == ("other" if hang.kind == "branch" else "step")
    )


def _number(entered: int) -> int:
    """The collective that a call of `step` enters after so many others."""
    return [0, 1, 0, 1, 0, 1, 2, 3][entered % COLLECTIVES]


def hangs(count: int, processes: int, kinds: Sequence[str] = KINDS) -> Iterator[Hang]:
    """Hangs of all kinds in turn, by any process, at any collective."""
    rng = random.Random(0)
    for kind in itertools.islice(itertools.cycle(kinds), count):
        yield Hang(kind, rng.randrange(processes), rng.randrange(COLLECTIVES))


def cost(calls: int = 20, runs: int = 100) -> float:
    """Microseconds of processor time that a mark takes on one device, beside the collective."""
    import jax
    import numpy as np

    import gshard

    jax.config.update("jax_num_cpu_devices", 2)
    x, times = np.ones((2, 64), np.float32), []

    def many(x):
        x = gshard.split(x, 0, 2)
        return jax.lax.fori_loop(0, runs, lambda _, x: x + 0.1 * x.sum(0), x)

    with tempfile.TemporaryDirectory() as name:
        for place in ("", name):
            os.environ[recording.VARIABLE] = place
            run = gshard.jit(lambda x: many(x))  # another program each time
            placed = run(x)
            spent = []
            for _ in range(calls):
                begun = time.process_time()
                jax.block_until_ready(run(placed))
                spent.append(time.process_time() - begun)
            times.append(min(spent))
    return 1e6 * (times[1] - times[0]) / (2 * runs)


def main() -> None:
    """Plant, and print a line for each; exit status 1 if one was not named right, and in time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hangs", type=int, default=50)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--kinds", default=",".join(KINDS), help="of hangs, in turn")
    parser.add_argument("--cost", action="store_true", help="measure what a mark costs instead")
    options = parser.parse_args()
    warm_up()
    if options.cost:
        print(f"a mark takes {cost():.0f} microseconds of processor time on each device")
        return
    kinds = options.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"{', '.join(sorted(unknown))}: the kinds are {', '.join(KINDS)}")
    wanted = hangs(options.hangs, options.processes, kinds)
    wrong = total = 0
    longest = 0.0
    with tempfile.TemporaryDirectory(prefix="gshard-hangs-") as name:
        for hang, right, took, words in run(
            sorted(wanted, key=_last), options.processes, Path(name)
        ):
            total += 1
            wrong += not right or took > SECONDS
            longest = max(longest, took)
            print(
                f"{'right' if right else 'WRONG'} {took:5.1f} s  {hang.kind}: {words}", flush=True
            )
    named = f"{total - wrong} of {total} hangs named right within {SECONDS:.0f} s"
    print(f"{named}; {longest:.1f} s at most")
    sys.exit(bool(wrong))


def _last(hang: Hang) -> bool:
    return hang.kind in ENDING


def run(
    wanted: Sequence[Hang], processes: int, folder: Path
) -> Iterator[tuple[Hang, bool, float, str]]:
    """Plant one hang after the other; those that can go on share their processes."""
    group: Group | None = None
    try:
        for hang in wanted:
            group = group or Group(processes, folder / "record")
            yield hang, *planted(group, hang)
            if hang.kind in ENDING:
                group.end()
                group = None
    finally:
        if group is not None:
            group.end()


def warm_up() -> None:
    """Import what the processes need; they are forks of this one."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    import gshard  # noqa: F401


if __name__ == "__main__":
    main()
