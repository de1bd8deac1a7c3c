"""Real text on one GPU: `base` as `gshard train` runs it, with reading and packing included.

    python -m benchmarks.gpu.text TOKENS sample.npz     some of a run's tokens, for another machine

A run's folder `tokens/train` holds the text as token ids. The sample is one file of them: for each
direction of translation so many examples, the first in the order of a shuffle.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.fresh import fresh_model
from benchmarks.gpu.kernels import profile
from benchmarks.gpu.timing import peak_gb
from benchmarks.gpu.train import PEAK, config_of
from gshard.mt.batching.batches import Batches, BatchIterator
from gshard.mt.batching.tokenizer import Task
from gshard.mt.batching.tokens import TaskTokens, open_task, some_of
from gshard.mt.config import RunConfig
from gshard.mt.presets import preset
from gshard.mt.training.programs import (
    Guard,
    Programs,
    RunState,
    Setup,
    StepFigures,
    make_optimizer,
)
from gshard.nn import TrainState
from gshard.nn.config import step_flops
from gshard.nn.strategy import ONE_DEVICE


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Steps on fresh batches, the host one step ahead as in `gshard.mt.training.loop`."""
    config = run_config(case)
    with tempfile.TemporaryDirectory() as folder:
        tokens = unpack(Path(case["text"]), Path(folder), reverse=case.get("reverse", False))
        batches = Batches(tokens, config.batch, workers=config.data.workers)
        programs = Programs(Setup(config, config.model, jax.devices()[:1], ONE_DEVICE))
        iterator = batches.iterate()
        begin = time.perf_counter()
        programs.compile(batches[0])
        compiling = time.perf_counter() - begin
        state = first_state(config)
        found = steps(programs, state, iterator, config, case.get("steps", 60))
        iterator.close()
    return {"compile_s": compiling, "peak_gb": peak_gb(), **found}


def run_config(case: dict[str, Any]) -> RunConfig:
    """The preset `base` with the case's model and rows of its lengths, computed for one GPU."""
    base = preset("base")
    source, target = case["lengths"]
    rows = case["tokens"] // source
    return replace(
        base,
        model=config_of(case),
        batch=replace(base.batch, rows=rows, source_length=source, target_length=target),
        optimizer=replace(base.optimizer, fused=True, **case.get("optimizer", {})),
        data=replace(base.data, workers=case.get("workers", 0)),
    )


def first_state(config: RunConfig) -> RunState:
    """Fresh weights, and an optimizer's and a guard's state that have seen nothing."""
    model = fresh_model(config.model)
    opt_state = jax.jit(make_optimizer(config.optimizer).init)(model)
    guard = jax.tree.map(jnp.copy, Guard.new())  # steps use each number up
    return RunState(TrainState(model, opt_state, jnp.zeros((), jnp.int32)), guard)


def steps(
    programs: Programs, state: RunState, iterator: BatchIterator, config: RunConfig, count: int
) -> dict[str, Any]:
    """Time `count` steps after some to warm up; tokens are counted without padding."""
    losses, waited, tokens = [], 0.0, np.zeros(2)
    pending: StepFigures | None = None
    for number in range(-5, count):
        if number == 0:
            jax.block_until_ready(state)
            begin, waited, tokens = time.perf_counter(), 0.0, np.zeros(2)
        asked = time.perf_counter()
        arrays = next(iterator)
        waited += time.perf_counter() - asked
        state, figures = programs.step(state, arrays)
        tokens += [np.count_nonzero(arrays[f"{side}_segments"]) for side in ("source", "target")]
        if pending is not None:
            losses.append(float(pending.metrics.nll))
        pending = figures
    jax.block_until_ready(state)
    seconds = time.perf_counter() - begin
    slots = np.array([config.batch.source_length, config.batch.target_length]) * config.batch.rows
    holder = [state]

    def run() -> None:
        holder[0], _ = programs.step(holder[0], arrays)
        jax.block_until_ready(holder[0])

    kinds, kernels = profile(run, 2) if jax.default_backend() == "gpu" else ({}, [])
    return {
        "ms": 1e3 * seconds / count,
        "source_tokens_per_s": tokens[0] / seconds,
        "target_tokens_per_s": tokens[1] / seconds,
        "share": count * step_flops(config.model, *slots) / seconds / PEAK,
        "share_without_padding": step_flops(config.model, *tokens) / seconds / PEAK,
        "filled": list(tokens / slots / count),
        "data_wait": waited / seconds,
        "losses": losses[:: max(1, len(losses) // 20)],
        "kinds_ms": kinds,
        "kernels": kernels,
    }


def pack_sample(folder: Path, path: Path, examples: int) -> None:
    """Some examples of every task under `folder`, in one file."""
    arrays: dict[str, np.ndarray] = {}
    for place in sorted(folder.iterdir()):
        tokens = open_task(place, Task(*place.name.split("-")))
        chosen = np.random.default_rng(0).permutation(len(tokens))[:examples]
        some = some_of(tokens, np.sort(chosen))
        for name, array in _files(some).items():
            arrays[f"{place.name}/{name}"] = array
    np.savez_compressed(path, **arrays)


def unpack(path: Path, folder: Path, *, reverse: bool = False) -> list[TaskTokens]:
    """The tasks of a sample as files that workers can map; in `reverse`, from target to source."""
    found = {}
    with np.load(path) as arrays:
        for given in arrays.files:
            task, name = given.split("/")
            if reverse:
                task = "-".join(reversed(task.split("-")))
                side, *rest = name.split("_")
                name = "_".join([_OTHER.get(side, side), *rest])
            (folder / task).mkdir(parents=True, exist_ok=True)
            np.save(folder / task / f"{name}.npy", arrays[given])
            found[task] = Task(*task.split("-"))
    return [open_task(folder / name, task) for name, task in found.items()]


_OTHER = {"source": "target", "target": "source"}


def _files(tokens: TaskTokens) -> dict[str, np.ndarray]:
    """What `gshard.mt.batching.tokens` keeps of a task, by the names of its files."""
    return {
        "source": tokens.source.ids,
        "source_ends": tokens.source.ends,
        "target": tokens.target.ids,
        "target_ends": tokens.target.ends,
        "words": tokens.english_words,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a run's tokens/train")
    parser.add_argument("sample", type=Path)
    parser.add_argument("--examples", type=int, default=6_000, help="of every task, at most")
    options = parser.parse_args()
    pack_sample(options.folder, options.sample, options.examples)


if __name__ == "__main__":
    main()
