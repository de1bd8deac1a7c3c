"""Pipelines: bubbles, bytes, memory, time.

    python -m benchmarks.pipelines                 bubbles, bytes and memory; no accelerator needed
    python -m benchmarks.pipelines --processes 4   a stage in each process, over sockets: seconds
    python -m benchmarks.pipelines --gpu           one of 8 stages on a GPU, the others XLA's mock
    ... --gpu --profile                            and what its kernels take, twice as long
    python -m benchmarks.pipelines --big           a 67B-A2B model on 64 H100s: a forecast
    python -m benchmarks.pipelines --auto          gshard.auto of a model that fits in stages only
    ... --out results.txt                          results in a file as well

On a GPU, a stage of a Transformer of the paper's shapes, 36 layers in 8 stages, is timed and
compared with a scan over as many layers, microbatch by microbatch, without a pipeline; layers are
rematerialized in both, and the bubble is in neither time. What a device would send is what it
receives (`benchmarks.gpu.many`). Every row is printed when it is known; the three rows take
`--seconds` at most. With `--profile` there is another row, since the first stage of `zb-h1` keeps
nothing for W, and a profile of each, without XLA's CUDA graphs: it names no kernels inside of them.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

import gshard
from benchmarks import pipelines_67b, pipelines_sockets
from benchmarks.gpu.many import numbers_of
from benchmarks.gpu.timing import peak_gb
from benchmarks.many_gpus import ALONE
from benchmarks.speed_gpu import CUBLAS
from examples.recipes.transformer import Params, Size, block, norm
from gshard.pipelining.schedules import NAMES, make

SMALL = Size(L=8, B=32, S=32, M=64, N=4, F=256, V=256)
DEEP = Size(L=32, B=8, S=4, M=128, N=4, F=512, V=256)
SOCKETS = Size(L=8, B=64, S=64, M=1024, N=8, F=4096, V=256)
PAPER = Size(L=36, B=128, S=1024, M=1024, N=16, F=8192, V=256)  # stages 0 to 3: 5 layers, no head
LEAST = 45  # seconds on the GPU that are left to each of the programs after one
PROFILED = "--xla_gpu_enable_command_buffer="  # no CUDA graphs


def loss(params: Params, x, labels, stages: int, microbatches: int, schedule: str, layer: Any):
    """Cross-entropy after all layers; without a pipeline, those of one microbatch after another."""

    def head(y, labels):
        logits = (norm(y, params["norm"]) @ params["head"]).astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
        return jnp.sum(jax.nn.logsumexp(logits, -1) - chosen)

    if not stages:
        y, _ = jax.lax.scan(lambda x, w: (layer(w, x), None), x, params["layers"])
        return head(y, labels)
    how = {"stages": stages, "microbatches": microbatches, "schedule": schedule}
    return gshard.pipeline(layer, params["layers"], x, head=head, targets=labels, **how)


def of_block(w, x):
    """A layer of the recipes' Transformer."""
    return block(x, w)


def shapes(size: Size, layers: int, dtype: Any = jnp.float32) -> tuple[Any, ...]:
    """Weights, the first layer's input, and labels."""
    M, N, H, F = size.M, size.N, size.M // size.N, size.F

    def of(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    dims = {"norm1": (M,), "q": (M, N, H), "k": (M, N, H), "v": (M, N, H), "out": (N, H, M),
            "norm2": (M,), "up": (M, F), "down": (F, M)}  # fmt: skip
    stacked = {name: of(layers, *shape) for name, shape in dims.items()}
    params = {"layers": stacked, "norm": of(M), "head": of(M, size.V)}
    return params, of(size.B, size.S, M), jax.ShapeDtypeStruct((size.B, size.S), jnp.int32)


def step_of(stages: int, microbatches: int, schedule: str, layer: Any = of_block) -> Any:
    """The gradient of the loss; with no stages, summed in a scan over the microbatches."""

    def step(params, x, labels):
        gradient = jax.value_and_grad(loss)
        if stages:
            return gradient(params, x, labels, stages, microbatches, schedule, layer)

        def one(sums, batch):
            found = gradient(params, *batch, 0, 1, schedule, layer)
            return jax.tree.map(jnp.add, sums, found), None

        cut = [a.reshape(microbatches, -1, *a.shape[1:]) for a in (x, labels)]
        none = jnp.zeros(())
        return jax.lax.scan(one, (none, jax.tree.map(jnp.zeros_like, params)), cut)[0]

    return step


def bubbles() -> None:
    """Counted in the tables, and by the formulas."""
    print(
        "| schedule | P, M | ticks | bubble | formula | in flight |\n|---|---|---:|---:|---|---:|"
    )
    for stages, microbatches in ((4, 8), (8, 16), (8, 64)):
        for name in NAMES:
            found = make(name, stages, microbatches)
            idle = (stages - 1) * (1 if name.startswith("zb") else 3)
            share = idle / (3 * microbatches * found.chunks + idle)
            assert found.ticks == 3 * microbatches * found.chunks + idle, (name, found.ticks)
            cells = (name, f"{stages}, {microbatches}", found.ticks, f"{found.bubble:.1%}")
            formula = "(P-1)" if name.startswith("zb") else "3(P-1)"
            print(f"| {' | '.join(map(str, cells))} | {formula}: {share:.1%} | {found.in_flight} |")


def memory_and_bytes() -> None:
    """Temporary memory as compiled and forecast, and bytes between stages over the least."""
    print("\n| schedule | M | temporary, KB | forecast | sent between stages, of the least |")
    print("|---|---:|---:|---:|---:|")
    for name in ("gpipe", "1f1b", "zb-h1"):
        for microbatches in (8, 16, 32):
            size = Size(**{**vars(SMALL), "B": 4 * microbatches})
            lowered = gshard.jit(step_of(4, microbatches, name), devices=jax.devices()[:4]).lower(
                *shapes(size, size.L)
            )
            found = lowered.compile().memory_analysis().temp_size_in_bytes
            planned = lowered.forecast("cpu").memory.temporary
            sent = sum(c.total_bytes for c in lowered.collectives if c.kind == "collective_permute")
            least = 2 * size.B * size.S * size.M * 4
            cells = (name, microbatches, f"{found / 1e3:,.0f}", f"{planned / 1e3:,.0f}")
            print(f"| {' | '.join(map(str, cells))} | {sent / least:.2f} |")


def made(shape: Any, sharding: Any = None) -> Any:
    """Small numbers, or labels."""

    def fill() -> Any:
        if jnp.issubdtype(shape.dtype, jnp.integer):
            return jnp.zeros(shape.shape, shape.dtype)
        last = jnp.arange(shape.shape[-1], dtype=jnp.float32)
        return jnp.broadcast_to(0.02 * jnp.sin(last), shape.shape).astype(shape.dtype)

    return jax.jit(fill, out_shardings=sharding)()


def seconds(run: Any, arguments: Any, steps: int = 3) -> float:
    """The median of some steps."""
    jax.block_until_ready(run(*arguments))
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        times.append(time.perf_counter() - begin)
    return float(np.median(times))


def member(number: int, port: int, count: int, rows: int, limit: int, out: str) -> None:
    """One of the processes: the measured and the forecast time of a step by each schedule."""
    pipelines_sockets.joined(number, port, count)
    size = Size(**{**vars(SOCKETS), "B": rows})

    def program(schedule: str) -> Any:
        return step_of(count, 2 * count, schedule), shapes(size, size.L)

    tell = functools.partial(say, out=out)
    pipelines_sockets.measure(program, placed, count, limit, tell)


def placed(lowered: gshard.Lowered, arguments: Any) -> Any:
    """Small numbers of these shapes, on the devices that the program wants them on."""
    leaves, tree = jax.tree.flatten(arguments)
    info = jax.tree.leaves(lowered.in_info)
    return jax.tree.unflatten(
        tree, [made(s, i.sharding) for s, i in zip(leaves, info, strict=True)]
    )


def on_gpu(stages: int, stage: int, schedule: str, out: str, profiled: bool) -> None:
    """Milliseconds of a `stage` of `stages`, or (0) of as many layers without a pipeline."""
    microbatches, begin = 16, time.perf_counter()
    if stages:  # before JAX looks for devices
        jax.config.update("jax_mock_gpu_topology", f"1x{stages}x1")
        multihost_utils.assert_equal = lambda *_, **__: None  # what others answer is garbage
    layers = PAPER.L if stages else -(-PAPER.L // 8)
    arguments = shapes(PAPER, layers, jnp.bfloat16)
    step = step_of(stages, microbatches, schedule, jax.checkpoint(of_block))

    def tell(line: str) -> None:
        name = f"stage {stage} of {stages} by {schedule}" if stages else "no pipeline"
        name = f"{name}, profiled" if profiled else name
        say(f"{name}, {time.perf_counter() - begin:.0f} s: {line}", out)

    with numbers_of({"numbers": "real"}):
        devices = np.roll(jax.devices()[: max(stages, 1)], stage)  # the first is no mock
        lowered = gshard.jit(step, devices=[*devices]).lower(*arguments)
        tell("lowered")
        compiled = lowered.compile()
    tell("compiled")
    given = placed(lowered, arguments)
    jax.block_until_ready(given)
    tell("arguments are there")
    found = seconds(compiled, given, steps=9)
    tell(f"{1e3 * found:.1f} ms for {microbatches} microbatches, {peak_gb():.0f} GB")
    if not profiled:
        return
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(compiled(*given))
        tell(f"kernels\n{kernels(Path(folder), compiled.as_text())}")
        tell(str(lowered.measured(folder, "h200")))


def kernels(folder: Path, text: str) -> str:
    """The instructions that take most of a step, where they are, and how long the GPU is idle."""
    busy, count, spans = Counter[str](), Counter[str](), []
    for path in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            lines = plane.lines if plane.name.startswith("/device:GPU") else ()
            for event in (e for line in lines if "Stream" in line.name for e in line.events):
                own = [str(value) for name, value in event.stats if name == "hlo_op"]
                op = own[-1] if own else event.name[:60]
                busy[op] += event.duration_ns
                count[op] += 1
                spans.append((event.start_ns, event.start_ns + event.duration_ns))
    end, idle = min(spans)[0], 0.0
    for begin, until in sorted(spans):
        idle, end = idle + max(begin - end, 0.0), max(end, until)
    rows = [f"busy {sum(busy.values()) / 1e6:.1f} ms in {len(spans)}, idle {idle / 1e6:.1f} ms"]
    for op, nanoseconds in busy.most_common(40):
        line = re.search(rf"%{re.escape(op)} = (.{{0,110}})", text)
        where = re.search(rf'%{re.escape(op)} = .*?op_name="([^"]*)"', text)
        name = where[1][-60:] if where else ""
        rows.append(f"{nanoseconds / 1e6:8.2f} ms {count[op]:5} {op}: {line and line[1]} {name}")
    return "\n".join(rows)


def by_auto() -> None:
    """A deep model whose layers are replicated within a stage: what fits, and what auto finds."""

    def layer(w, x):
        return of_block(jax.tree.map(gshard.replicate, w), x)

    def searched(stages: Any, seconds: float) -> Any:
        step, how = step_of(stages, 8, "auto", layer), {"devices": 4, "hardware": "h100"}
        return gshard.auto(step, *shapes(DEEP, DEEP.L), memory="26 MB", seconds=seconds, **how)

    for stages in (1, 2):
        try:
            print(f"{stages} stages: {searched(stages, 5)}")
        except ValueError as error:
            print(f"{stages} stages: {error}")
    print(searched("auto", 15))


def say(line: str, out: str) -> None:
    """A line on the screen, and in a file if there is one."""
    print(line, flush=True)
    if out:
        with Path(out).open("a", encoding="utf-8") as file:
            print(line, file=file)


def run_on_gpu(again: list[str], out: str, limit: int, profiled: bool) -> None:
    """Each program in a process of its own; together they take `limit` seconds at most.

    XLA divides autotuning among the devices of a program: it would wait for those that are mock.
    """
    flags = " ".join((os.environ.get("XLA_FLAGS", ""), CUBLAS, ALONE, PROFILED * profiled))
    cases = [(0, 0, "1f1b"), (8, 0, "1f1b"), (8, 0, "zb-h1"), (8, 3, "zb-h1")][: 3 + profiled]
    own, end = {**os.environ, "XLA_FLAGS": flags}, time.monotonic() + limit
    for later, (stages, stage, schedule) in zip(reversed(range(len(cases))), cases, strict=True):
        which = ["--of", str(stages), str(stage), "--schedule", schedule, "--out", out]
        command = [*again, *which, *["--profile"] * profiled]
        try:
            left = end - time.monotonic() - later * LEAST
            subprocess.run(command, check=True, timeout=left, env=own)
        except subprocess.SubprocessError as error:
            say(f"stage {stage} of {stages} by {schedule}: {error}", out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, metavar="N")
    parser.add_argument("--rows", type=int, default=SOCKETS.B, help="with --processes")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--big", action="store_true")
    parser.add_argument("--compile", action="store_true", help="with --big: for one device, on CPU")
    parser.add_argument("--out", default="", help="a file to which results are added")
    parser.add_argument("--member", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--of", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--schedule", default="zb-h1", help=argparse.SUPPRESS)
    parser.add_argument("--profile", action="store_true", help="with --gpu: profiles as well")
    parser.add_argument("--seconds", type=int, default=185, help="for all of the programs")
    parser.add_argument("--auto", action="store_true", help="gshard.auto with the stages open")
    chosen = parser.parse_args()
    again = [sys.executable, "-m", "benchmarks.pipelines"]
    if chosen.member:
        member(*chosen.member, chosen.processes, chosen.rows, chosen.seconds, chosen.out)
    elif chosen.of:
        on_gpu(*chosen.of, chosen.schedule, chosen.out, chosen.profile)
    elif chosen.gpu:
        run_on_gpu(again, chosen.out, chosen.seconds, chosen.profile)
    elif chosen.auto:
        by_auto()
    elif chosen.big:
        pipelines_67b.main(chosen.compile)
    elif chosen.processes:
        count, limit = chosen.processes, chosen.seconds
        settings = {"processes": count, "rows": chosen.rows, "seconds": limit, "out": chosen.out}
        options = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
        sys.exit(pipelines_sockets.run([*again, *options], count, limit))
    else:
        jax.config.update("jax_num_cpu_devices", 8)
        bubbles()
        memory_and_bytes()


if __name__ == "__main__":
    main()
