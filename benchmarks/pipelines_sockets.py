"""A stage in each of several processes, over sockets: `benchmarks.pipelines --processes 4`.

Each process has cores of its own, with one thread on each: with fewer cores than processes a bubble
costs nothing, since another stage uses the core. Memory that a step frees is kept for the next one:
pages that the system clears again may take longer than the step.

Processes first measure themselves (`forecast.measure`), all at once, and all plan by the figures of
the first. That their programs are equal is checked before one runs. The schedules take turns, each
round a step of every one; then the machine is measured again: its speed changes, and the forecast
is the mean of those by the figures before and after. Steps and machine are measured by the median:
by its best moments, the machine is faster than a step of seconds can be.
"""

from __future__ import annotations

import functools
import hashlib
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

import gshard
from gshard.forecast.hardware import Hardware, hardware
from gshard.forecast.measure import measured
from gshard.mt.launch.local import free_port
from gshard.pipelining.schedules import make

SCHEDULES = ("gpipe", "1f1b", "zb-h1")
ALIKE = {"JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": "0", "MALLOC_MMAP_MAX_": "0",
         "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_ARENA_MAX": "1"}  # fmt: skip
Told = Callable[[str], None]
Program = tuple[Any, tuple[Any, ...]]  # a step of a schedule, and the shapes of its arguments


def run(again: list[str], count: int, seconds: int) -> int:
    """The exit status of `count` processes of this command; where one fails, the others end."""
    port, end = free_port("127.0.0.1"), time.monotonic() + seconds + 60
    environment = {**os.environ, **ALIKE}
    members = [[*again, "--member", str(n), str(port)] for n in range(count)]
    running = [subprocess.Popen(each, env=environment) for each in members]
    try:
        while any(process.poll() is None for process in running):
            if any(process.poll() for process in running) or time.monotonic() > end:
                time.sleep(2)  # the others say why, if they can
                return max(1, *(process.poll() or 0 for process in running))
            time.sleep(0.2)
    finally:
        for process in running:
            process.kill()
    return 0


def cores_of(number: int, count: int) -> list[int]:
    """The cores of one of `count` processes: one of the threads that share a core."""
    found: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        found.setdefault(path.read_text() if path.exists() else str(cpu), cpu)
    cores = list(found.values())
    share = max(len(cores) // count, 1)
    return [cores[(number * share + i) % len(cores)] for i in range(share)]


def joined(number: int, port: int, count: int) -> list[int]:
    """This process's cores; it is one of `count` from here on."""
    own = cores_of(number, count)
    os.sched_setaffinity(0, own)  # before XLA makes its threads
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", count, number)
    return own


def of_first(text: str) -> str:
    """The text that the first process has."""
    own = np.frombuffer(text.encode().ljust(1 << 14), np.uint8)
    return multihost_utils.broadcast_one_to_all(own).tobytes().decode().rstrip()


def machine() -> tuple[Hardware, str]:
    """The figures of the first process, measured while all of them work."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        text = of_first(measured(10, statistics.median))
        file.write(text)
        file.flush()
        return hardware(file.name), text


def alike(lowered: gshard.Lowered, name: str) -> None:
    """That all processes are about to run one program: Gloo would fail, or hang, otherwise."""
    digest = hashlib.sha256(lowered.as_text().encode()).digest()[:8]
    every = multihost_utils.process_allgather(np.frombuffer(digest, np.int32)).reshape(-1, 2)
    if len({*map(tuple, every.tolist())}) > 1:
        raise RuntimeError(f"{name}: the processes have planned different programs: {every}")


def measure(
    program: Callable[[str], Program],
    placed: Callable[..., Any],
    count: int,
    seconds: int,
    say: Told,
) -> None:
    """The measured and the forecast time of a step by each schedule."""
    begin, (before, text) = time.monotonic(), machine()
    tell: Told = say if jax.process_index() == 0 else lambda _: None
    tell(f"{count} processes of {len(os.sched_getaffinity(0))} cores; each is measured as\n{text}")
    steps, times = {}, {name: list[float]() for name in SCHEDULES}
    for name in SCHEDULES:
        step, shapes = program(name)
        lowered = gshard.jit(step, hardware=before).lower(*shapes)
        alike(lowered, name)
        compiled, arguments = lowered.compile(), placed(lowered, shapes)
        steps[name] = lowered, functools.partial(compiled, *arguments)
        tell(
            f"{name}: first step {_seconds(steps[name][1]):.3f} s, {time.monotonic() - begin:.0f} s"
        )
    while not times["gpipe"] or _goes_on(begin, seconds, times):
        for name in SCHEDULES:
            times[name].append(_seconds(steps[name][1]))
    after, text = machine()
    tell(f"measured again as\n{text}")
    _reported(steps, times, (before, after), count, tell)


def _seconds(run: Callable[[], Any]) -> float:
    multihost_utils.sync_global_devices("a step")
    begin = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - begin


def _goes_on(begin: float, seconds: int, times: dict[str, list[float]]) -> bool:
    """Whether the first process has time for another round, and for measuring the machine."""
    left = begin + seconds - time.monotonic() - 15
    return of_first(str(left > sum(map(max, times.values())))) == "True"


def _reported(steps: Any, times: dict[str, list[float]], machines: tuple[Hardware, ...], count: int,
              tell: Told) -> None:  # fmt: skip
    by = [
        {n: float(low.forecast(m).step_seconds) for n, (low, _) in steps.items()} for m in machines
    ]
    for name, taken in times.items():
        found, expected = float(np.median(taken)), float(np.mean([each[name] for each in by]))
        each = ", ".join(f"{t:.3f}" for t in taken)
        tell(f"{name}: {found:.3f} s, the median of {each}; forecast {expected:.3f} s")
        before, after = (figures[name] for figures in by)
        tell(
            f"  {expected / found - 1:+.1%}: {before:.3f} by the figures before, {after:.3f} after"
        )
    tell(str(steps["zb-h1"][0].forecast(machines[0])))
    ratios = np.array(times["gpipe"]) / np.array(times["zb-h1"])
    ideal = make("gpipe", count, 2 * count).ticks / make("zb-h1", count, 2 * count).ticks
    rounds = ", ".join(f"{ratio:.3f}" for ratio in ratios)
    forecasts = ", ".join(f"{each['gpipe'] / each['zb-h1']:.3f}" for each in by)
    tell(f"zb-h1 at {np.median(ratios):.3f} of gpipe's speed, the median of {rounds}")
    tell(f"  by forecasts {forecasts}, by ticks {ideal:.3f}")
