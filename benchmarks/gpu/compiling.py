"""How long the training step takes to be ready in a fresh process, from shapes alone."""

from __future__ import annotations

import functools
import itertools
import time
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.text import run_config
from benchmarks.gpu.train import LENGTH, config_of
from gshard.mt.training.programs import Programs, Setup
from gshard.nn import TrainState, Transformer, adafactor, train_step
from gshard.nn.config import Batch
from gshard.nn.strategy import ONE_DEVICE


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Seconds of tracing, of writing down for XLA, and of compiling or finding it compiled."""
    if case.get("keeps_step"):
        return of_a_run(case)
    config = config_of(case)
    optimizer = adafactor(fused=True)
    model = eqx.filter_eval_shape(Transformer, config, jax.random.key(0))
    opt_state = jax.eval_shape(optimizer.init, model)
    state = TrainState(model, opt_state, jax.ShapeDtypeStruct((), jnp.int32))
    length = case.get("length", LENGTH)
    rows = jax.ShapeDtypeStruct((case["tokens"] // length, length), jnp.int32)
    batch = Batch(*[rows] * len(Batch._fields))
    key = jax.random.key(1)
    step = jax.jit(functools.partial(train_step, optimizer=optimizer), donate_argnums=0)
    marks = [time.perf_counter()]
    traced = step.trace(state, batch, key)
    marks.append(time.perf_counter())
    lowered = traced.lower()
    marks.append(time.perf_counter())
    lowered.compile()
    marks.append(time.perf_counter())
    trace, lower, compiling = (b - a for a, b in itertools.pairwise(marks))
    return {
        "trace_s": trace,
        "lower_s": lower,
        "compile_s": compiling,
        "ready_s": marks[-1] - marks[0],
    }


def of_a_run(case: dict[str, Any]) -> dict[str, Any]:
    """Seconds until the step of `gshard train` is ready, which is found by its settings."""
    config = run_config({**case, "lengths": (LENGTH, LENGTH)})
    rows = np.zeros((config.batch.rows, LENGTH), np.int32)
    devices = jax.devices()[:1]
    begin = time.perf_counter()
    programs = Programs(Setup(config, config.model, devices, ONE_DEVICE, keeps_step=True))
    made = time.perf_counter()
    programs.compile(dict.fromkeys(Batch._fields, rows))
    return {"shapes_s": made - begin, "ready_s": time.perf_counter() - made}
