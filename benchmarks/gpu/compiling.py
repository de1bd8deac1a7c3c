"""How long the training step takes to be ready in a fresh process, from shapes alone."""

from __future__ import annotations

import functools
import itertools
import time
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from benchmarks.gpu.train import LENGTH, config_of
from gshard.nn import TrainState, Transformer, adafactor, train_step
from gshard.nn.config import Batch


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Seconds of tracing, of writing down for XLA, and of compiling or finding it compiled."""
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
