"""Loss curves of one training in several kinds of numbers, on the same real batches.

Experts have the paper's capacity, or none. Weights are float32 or bfloat16, products bfloat16 or
float8. Weights of bfloat16 are rounded at random (`gshard.nn.optimizer`), or, as the case
that goes wrong, to the nearest. All begin with the same weights, and the learning rate falls to 0,
so that updates get smaller than a weight's last bit.
"""

from __future__ import annotations

import functools
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.fresh import fresh_model
from benchmarks.gpu.text import run_config, unpack
from gshard.mt.batching.batches import Batches
from gshard.mt.config import RunConfig
from gshard.mt.training.programs import make_optimizer
from gshard.nn import TrainState, Transformer, train_step
from gshard.nn.config import PAPER_GATING, Batch

WAYS: dict[str, dict[str, Any]] = {
    "float32": {"weights": "float32", "fused": True},
    "bfloat16, rounded at random": {"weights": "bfloat16", "fused": True},
    "bfloat16, rounded to the nearest": {"weights": "bfloat16", "fused": False},
    "bfloat16, rounded at random, float8 products": {
        "weights": "bfloat16",
        "fused": True,
        "config": {"products": "float8"},
    },
    "bfloat16, rounded at random, float8 exchange": {
        "weights": "bfloat16",
        "fused": True,
        "config": {"exchange": "float8"},
    },
    "bfloat16, rounded at random, no capacity": {
        "weights": "bfloat16",
        "fused": True,
        "config": {"dispatch": "dropless"},
    },
    # The same choices by another implementation: if it learns otherwise, a kernel is wrong.
    "bfloat16, rounded at random, a slot for every choice": {
        "weights": "bfloat16",
        "fused": True,
        "config": {"gating": replace(PAPER_GATING, capacity_factor=1e9)},
    },
}


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Losses of every step in each way; compiled at once, trained one after another."""
    steps = case["steps"]
    optimizer = {"warmup": steps, "rise": steps // 8, "fall": steps // 2, "end": steps}
    configs = {name: _config(case, WAYS[name], optimizer) for name in case.get("ways", WAYS)}
    some = _config(case, WAYS["float32"], optimizer)
    first = fresh_model(some.model)  # its numbers are bfloat16's
    with tempfile.TemporaryDirectory() as folder:
        tokens = unpack(Path(case["text"]), Path(folder))
        begin = time.perf_counter()
        with ThreadPoolExecutor() as pool:
            made = {
                name: pool.submit(ready, config, WAYS[name]["fused"], first)
                for name, config in configs.items()
            }
            packed = Batches(tokens, some.batch)
            batches = [_batch(packed[step]) for step in range(steps)]
            programs = {name: future.result() for name, future in made.items()}
        compiling = time.perf_counter() - begin
    found = {}
    for name, (compiled, start) in programs.items():
        begin = time.perf_counter()
        every = [run(compiled, start, first, batches, s) for s in range(case.get("seeds", 1))]
        seconds = (time.perf_counter() - begin) / len(every)
        ends = [float(np.mean(losses[-(steps // 6) :])) for losses, _ in every]
        mean = [float(x) for x in np.mean([losses for losses, _ in every], axis=0)]
        dead = np.mean([own for _, own in every], axis=0)
        seen = [step for step in (20, 100, 300) if step < steps]
        print(f"experts without a token at steps {seen}:", dead[seen].round(1))
        found[name] = {"nll": mean, "ends": ends, "seconds": seconds}
        print(name, ends, round(seconds), flush=True)
    return {"curves": found, "compile_s": compiling}


def _config(case: dict[str, Any], way: dict[str, Any], optimizer: dict[str, int]) -> RunConfig:
    """The case's run in one of the ways."""
    config = {**case.get("config", {}), **way.get("config", {})}
    return run_config({**case, "weights": way["weights"], "config": config, "optimizer": optimizer})


def ready(config: RunConfig, fused: bool, first: Transformer) -> tuple[Any, Any]:
    """The compiled step for weights of the config's dtype, and how a state is made of `first`."""
    optimizer = make_optimizer(replace(config.optimizer, fused=fused))

    def start(first: Transformer) -> TrainState:
        leaves = jax.tree.leaves(first)
        model = jax.tree.unflatten(
            jax.tree.structure(_shapes(config)),
            [leaf.astype(config.model.weight_dtype) for leaf in leaves],
        )
        return TrainState(model, optimizer.init(model), jnp.zeros((), jnp.int32))

    rows = config.batch.rows
    lengths = [
        config.batch.source_length if name.startswith("source") else config.batch.target_length
        for name in Batch._fields
    ]
    batch = Batch(*(jax.ShapeDtypeStruct((rows, length), jnp.int32) for length in lengths))
    step = functools.partial(
        train_step, optimizer=optimizer, label_smoothing=config.train.label_smoothing
    )
    state = jax.eval_shape(start, first)
    key = jax.random.key(config.train.seed)
    return jax.jit(step, donate_argnums=0).lower(state, batch, key).compile(), start


def run(
    compiled: Any, start: Any, first: Transformer, batches: list[Batch], seed: int
) -> tuple[list[float], list[float]]:
    """Losses and experts without a token, at each step; what is random depends on the seed."""
    state = jax.jit(start)(jax.tree.map(jnp.copy, first))  # which steps may then use up
    key = jax.random.key(seed)
    losses, dead = [], []
    for batch in batches:
        state, metrics = compiled(state, batch, key)
        losses.append(metrics.nll)
        dead.append(jnp.mean(metrics.encoder.dead_experts))
    return tuple(np.asarray(jnp.stack(each)).tolist() for each in (losses, dead))


def _shapes(config: RunConfig) -> Transformer:
    return jax.eval_shape(lambda key: Transformer(config.model, key), jax.random.key(0))


def _batch(arrays: dict[str, np.ndarray]) -> Batch:
    return Batch(*(jnp.asarray(arrays[name], jnp.int32) for name in Batch._fields))
