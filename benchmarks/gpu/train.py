"""A training step of the paper's dims on one GPU: milliseconds, tokens/s and share of peak."""

from __future__ import annotations

import functools
import time
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.fresh import fresh_model
from benchmarks.gpu.kernels import profile
from benchmarks.gpu.packed import packed_batch
from benchmarks.gpu.timing import peak_gb
from gshard.nn import TrainState, adafactor, train_step
from gshard.nn.config import step_flops
from gshard.nn.family import FAMILY

PEAK = 989e12
LENGTH = 256


def config_of(case: dict[str, Any]) -> Any:
    """The paper's model with that many experts, computed in the way that the case names."""
    base = FAMILY["moe_128e_12l"].config
    config = replace(
        base,
        experts=case["experts"],
        groups=case["tokens"] // 2048,
        dtype="bfloat16",
        weight_dtype=case.get("weights", "bfloat16"),
        **case.get("dims", {}),
    )
    if case.get("tuned", True):
        config = config.tuned()
    return replace(config, **case.get("config", {}))


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """One case: compile, time some steps, and if asked look at the kernels."""
    config = config_of(case)
    rate = case.get("rate", 1.0)  # small: routers stay as they begin
    optimizer = adafactor(rate, fused=case.get("fused", case.get("tuned", True)))
    lengths = case.get("lengths", (LENGTH, LENGTH))
    tokens = [case["tokens"] // lengths[0] * length for length in lengths]
    vocabs = (config.source_vocab, config.target_vocab)
    batch = jax.device_put(packed_batch(tokens[0] // lengths[0], lengths, vocabs))
    key = jax.random.key(1)

    begin = time.perf_counter()
    model = fresh_model(config)
    opt_state = jax.jit(optimizer.init)(model)
    state = jax.block_until_ready(TrainState(model, opt_state, jnp.zeros((), jnp.int32)))
    del model, opt_state
    initialized = time.perf_counter() - begin
    step = jax.jit(functools.partial(train_step, optimizer=optimizer), donate_argnums=0)
    begin = time.perf_counter()
    compiled = step.lower(state, batch, key).compile()
    compiling = time.perf_counter() - begin
    memory = compiled.memory_analysis()
    state, metrics, losses, times = timed(compiled, state, batch, key, case.get("repeats", 3))
    seconds = float(np.median(times))
    real = [
        float(np.mean(np.asarray(s) > 0)) for s in (batch.source_segments, batch.target_segments)
    ]
    flops = step_flops(config, *tokens)
    needed = step_flops(config, tokens[0] * real[0], tokens[1] * real[1])
    found = {
        "weights": sum(x.size for x in jax.tree.leaves(state.model)),
        "ms": 1e3 * seconds,
        "ms_all": [1e3 * t for t in times],
        "source_tokens_per_s": tokens[0] / seconds,
        "target_tokens_per_s": tokens[1] / seconds,
        "share": flops / seconds / PEAK,
        "share_without_padding": needed / seconds / PEAK,
        "filled": real,
        "compile_s": compiling,
        "init_s": initialized,
        "losses": losses,
        "routers": routers(metrics),
        "peak_gb": peak_gb(),
        "temp_gb": memory.temp_size_in_bytes / 1e9,
        "tflop": flops / 1e12,
    }
    if case.get("profile"):
        holder = [state]

        def run() -> None:
            holder[0], _ = compiled(holder[0], batch, key)
            jax.block_until_ready(holder[0])

        found["kinds_ms"], found["kernels"] = profile(run, 2)
    return found


def timed(compiled: Any, state: TrainState, batch: Any, key: Any, repeats: int) -> Any:
    """The state after some steps, losses on the way, and seconds a step of each dozen.

    Within a dozen the host is ahead of the device, as it is in a training.
    """
    losses, times = [], []
    for _ in range(3):
        state, metrics = compiled(state, batch, key)
        losses.append(float(metrics.nll))
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(12):
            state, metrics = compiled(state, batch, key)
        jax.block_until_ready(state)
        times.append((time.perf_counter() - begin) / 12)
    losses.append(float(metrics.nll))
    return state, metrics, losses, times


def routers(metrics: Any) -> dict[str, float]:
    """What the experts of the last step had: choices without a slot, tokens by their experts."""
    names = ("overflow_first", "overflow_second", "tokens_0", "tokens_1", "tokens_2")
    both = [x for x in (metrics.encoder, metrics.decoder) if x is not None]
    return {n: float(np.mean([np.mean(getattr(x, n)) for x in both])) for n in names}
