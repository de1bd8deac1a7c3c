"""Step times with communication in pieces and without, in 4 processes that are joined by sockets.

    python -m benchmarks.overlap_processes              4 processes on loopback, with Gloo
    python -m benchmarks.overlap_processes --small      whether it runs, on any machine

Each process has one device and its own share of the machine's cores: where there are fewer cores
than processes, products and sockets compete for them and nothing can be hidden. The program with
`overlap=True` and the one without take turns; the ratio of their times is the median over rounds
(`benchmarks.paired`). Both give the same values, and pieces send no more bytes, or it is an error.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gshard
from benchmarks.paired import interval, median_ratio, timed
from benchmarks.programs import normal
from benchmarks.step_time import agreed_by_all
from examples.moe_layer import moe_loss, shapes
from gshard.mt.launch.local import free_port

SECONDS = 20.0  # for the rounds of a row


def steps(devices: int, small: bool) -> Iterator[tuple[str, Callable, tuple[Any, ...]]]:
    """The names, the functions and arguments for them."""
    tokens, dim, hidden = (64, 32, 64) if small else (2048, 512, 1024)

    def moe_step(*args: Any) -> Any:
        return jax.value_and_grad(moe_loss, argnums=(0, 1, 2, 3))(*args, devices=devices)

    def loss(weights: Any, x: Any) -> Any:
        for up, down in weights:
            up, down = gshard.split(up, 1, devices), gshard.split(down, 0, devices)
            x = x + gshard.replicate(jax.nn.gelu(x @ up) @ down)
        return jnp.mean(x**2)

    args = shapes(devices, tokens, dim, hidden, devices)
    moe = tuple(normal(*s.shape, seed=i) / 8 for i, s in enumerate(args))
    yield "MoE layer, value and gradient", moe_step, moe
    weights = [(normal(dim, 4 * dim) / dim, normal(4 * dim, dim) / dim) for _ in range(2)]
    blocks = jax.value_and_grad(loss), (weights, normal(2 * tokens, dim))
    yield "2 feed-forward blocks, tensor parallel", *blocks


def measure(name: str, fn: Callable, args: tuple[Any, ...], seconds: float) -> str:
    """A line of the table."""
    runs: dict[str, Callable[[], Any]] = {}
    sent, values = [], []
    for overlap in (True, False):
        lowered = gshard.jit(fn, overlap=overlap, devices=jax.devices()).lower(*args)
        compiled = lowered.compile()
        placed = compiled.place(*args)
        runs[str(overlap)] = lambda compiled=compiled, placed=placed: compiled(*placed)
        results = jax.tree.leaves(runs[str(overlap)]())
        values.append([np.asarray(x.addressable_data(0)) for x in results])
        sent.append(sum(c.total_bytes for c in lowered.collectives))
    for one, other in zip(*values, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    assert sent[0] <= sent[1], f"{name}: {sent[0]:,} bytes in pieces, {sent[1]:,} without"
    clock, _ = timed(runs, seconds, agreed_by_all)
    low, high = interval(clock, "True", "False")
    ms = [1e3 * float(np.median(clock[key])) for key in ("False", "True")]
    ratio = f"{median_ratio(clock, 'True', 'False'):.3f} | {low:.3f} to {high:.3f}"
    return f"| {name} | {sent[0] / 1e6:.1f} | {ms[0]:.1f} | {ms[1]:.1f} | {ratio} |"


def run(options: argparse.Namespace) -> None:
    """What each process does."""
    cores = sorted(os.sched_getaffinity(0))
    each = max(len(cores) // options.processes, 1)
    first = options.member * each % len(cores)
    os.sched_setaffinity(0, cores[first : first + each])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = f"127.0.0.1:{options.port}"
    jax.distributed.initialize(address, options.processes, options.member)
    head = ("program", "MB sent", "ms", "ms in pieces", "ratio", "95% interval")
    lines = ["| " + " | ".join(head) + " |", "|---|---:|---:|---:|---:|---|"]
    for name, fn, args in steps(options.processes, options.small):
        lines.append(measure(name, fn, args, 0.0 if options.small else options.seconds))
    if options.member == 0:
        print("\n".join(lines))
        print(f"\n{options.processes} processes with {each} cores each, JAX {jax.__version__}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of rounds for a row")
    parser.add_argument("--small", action="store_true", help="small programs, one round")
    parser.add_argument("--member", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.member is not None:
        run(options)
        return
    port = free_port("127.0.0.1")
    command = [sys.executable, "-m", "benchmarks.overlap_processes", *sys.argv[1:]]
    running = [
        subprocess.Popen([*command, "--port", str(port), "--member", str(number)])
        for number in range(options.processes)
    ]
    try:
        sys.exit(max(process.wait() for process in running))
    finally:
        for process in running:
            process.kill()


if __name__ == "__main__":
    main()
