"""Flat beam search at the paper's dims on one GPU: milliseconds a step."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.fresh import fresh_model
from benchmarks.gpu.kernels import profile
from benchmarks.gpu.timing import peak_gb
from gshard.mt.decoding.on_device import beam_search
from gshard.mt.decoding.search import BeamConfig
from gshard.mt.training.loading import in_int8
from gshard.nn.family import FAMILY


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """A search with fresh weights, which hardly ever end a sentence: it makes all of its steps."""
    config = replace(
        FAMILY["moe_128e_12l"].config,
        experts=case["experts"],
        groups=None,
        dtype="bfloat16",
        weight_dtype="bfloat16",
    )
    if case.get("tuned", True):
        config = config.tuned()
    model = fresh_model(config)
    if case.get("int8"):
        model = in_int8(model)
    rng = np.random.default_rng(0)
    source = jnp.asarray(rng.integers(4, 32_000, (case["sentences"], 32)), jnp.int32)
    search = BeamConfig(beam=4, nbest=1, max_length=case.get("steps", 64), alpha=1.0)
    run = jax.jit(lambda m, s: beam_search(m, s, search))
    begin = time.perf_counter()
    compiled = run.lower(model, source).compile()
    compiling = time.perf_counter() - begin
    found = jax.block_until_ready(compiled(model, source))
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        jax.block_until_ready(compiled(model, source))
        times.append(time.perf_counter() - begin)
    seconds = statistics.median(times)
    steps = int(found.steps)
    result = {
        "steps": steps,
        "ms_a_step": 1e3 * seconds / steps,
        "sentences_per_s": case["sentences"] / seconds,
        "compile_s": compiling,
        "weights_gb": sum(leaf.nbytes for leaf in jax.tree.leaves(model)) / 1e9,
        "peak_gb": peak_gb(),
    }
    if case.get("profile"):
        kinds, kernels = profile(lambda: jax.block_until_ready(compiled(model, source)), 1)
        result["kinds_ms_a_step"] = {kind: ms / steps for kind, ms in kinds.items()}
        result["kernels"] = [(n, ms / steps, calls / steps) for n, ms, calls in kernels]
    return result
