"""The program of one of many GPUs on one real GPU: XLA pretends that the others are there.

With `jax_mock_gpu_topology` XLA compiles the program of so many GPUs and runs it on the one that
exists. Collectives cost nothing and leave garbage, so that a step's time is that of what one device
computes; what is compiled and its schedule are the real ones. Garbage is often zeros, which a GPU
multiplies faster: with `"numbers": "real"` what a device would send is what it receives, and no
collective is left in the program.
"""

from __future__ import annotations

import functools
import hashlib
import re
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

import gshard
from benchmarks.gpu.schedule import exposed_gb, kernels
from benchmarks.gpu.timing import peak_gb
from gshard.moving.collectives import CollectiveNode
from gshard.nn import FAMILY, Batch, Strategy, TrainState, adafactor, init_state, train_step
from gshard.nn.config import step_flops
from gshard.nn.hashing import hashed_bits

PEAK = 989e12
LENGTH = 256  # tokens of a row
SENTENCES = 8  # in a row


def config_of(case: dict[str, Any]) -> Any:
    """The case's model, computed in the ways that are fast on GPUs."""
    base = FAMILY[case["model"]].config
    config = replace(
        base,
        experts=case["experts"],
        groups=max(case["tokens"] * case["devices"] // 2048, case["devices"]),
        dtype="bfloat16",
        weight_dtype="bfloat16",
        products=case.get("products", "dtype"),
        exchange=case.get("exchange", "dtype"),
        **case.get("dims", {}),
    )
    return config.tuned()


def lowered(case: dict[str, Any], devices: Any, hardware: str | None = None) -> Any:
    """The case's training step, partitioned, and what it takes: (state, batch, key) as shapes."""
    config, strategy = config_of(case), Strategy(case["devices"])
    optimizer = adafactor(fused=True)
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(lambda key: init_state(config, optimizer, key), key)
    rows = case["tokens"] // case.get("length", LENGTH) * case["devices"]
    tokens = jax.ShapeDtypeStruct((rows, case.get("length", LENGTH)), jnp.int32)
    batch = Batch(*[tokens] * len(Batch._fields))

    def step(state: TrainState, batch: Batch, key: Any) -> Any:
        return train_step(state, batch, key, optimizer=optimizer, strategy=strategy)

    partitioner = case.get("partitioner", "gshard")
    run = gshard.jit(
        step,
        donate_argnums=0,
        devices=devices,
        hardware=hardware,
        partitioner=partitioner,
    )
    return run.lower(state, batch, key), (state, batch, key)


def numbers_of(case: dict[str, Any]) -> AbstractContextManager[Any]:
    """A context in which a program is lowered and compiled with the numbers that a case asks for.

    Forecasts read the program with its collectives.
    """
    if case.get("numbers") != "real":
        return nullcontext()
    return mock.patch.object(CollectiveNode, "run", _own)


def _own(node: CollectiveNode, place: Any, array: jax.Array) -> jax.Array:
    """What the device sends, as often as its result has room for it, in a collective's place."""
    shape = node.result(array.shape)
    own = array if shape == array.shape else jnp.resize(array, shape)
    return jax.lax.optimization_barrier(own)


def text_hash(lowered: Any) -> str:
    """Names the partitioned program: without addresses and folders."""
    text = re.sub(r"0x[0-9a-f]+|/\S*/", "", lowered.as_text())
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """One case: lower, compile, run some steps, and read the schedule."""
    devices, config = case["devices"], config_of(case)
    if devices > 1:  # before JAX looks for devices
        jax.config.update("jax_mock_gpu_topology", f"1x{devices}x1")
        multihost_utils.assert_equal = lambda *_, **__: None  # what others answer is garbage
    begin = time.perf_counter()
    with numbers_of(case):
        low, shapes = lowered(case, jax.devices()[:devices])
        lowering, begin = time.perf_counter() - begin, time.perf_counter()
        compiled = low.compile()
    compiling = time.perf_counter() - begin
    text = compiled.as_text() or ""
    found: dict[str, Any] = {"lower_s": lowering, "compile_s": compiling, "jax": jax.__version__}
    found["sent_gb"], found["exposed_gb"] = exposed_gb(text, devices)
    found["all_to_all_gb"], found["all_to_all_exposed_gb"] = exposed_gb(text, devices, "all_to_all")
    found["kernels"] = kernels(text)
    if case.get("partitioner", "gshard") == "gshard":
        found["text"] = text_hash(low)
    state, batch, key = _arguments(case, shapes, low.in_info)
    seconds = _seconds(compiled, state, batch, key, case.get("steps", 8))
    tokens = case["tokens"] * devices
    flops = step_flops(config, tokens, tokens) / devices
    return found | {
        "ms": 1e3 * seconds,
        "tokens_per_s": case["tokens"] / seconds,
        "share": flops / seconds / PEAK,
        "peak_gb": peak_gb(),
    }


def _seconds(compiled: Any, state: Any, batch: Any, key: Any, steps: int) -> float:
    """The median of three runs of some steps; within one the host is ahead of the device."""
    for _ in range(3):
        state, _ = compiled(state, batch, key)
    times = []
    for _ in range(3):
        jax.block_until_ready(state)
        begin = time.perf_counter()
        for _ in range(steps):
            state, _ = compiled(state, batch, key)
        jax.block_until_ready(state)
        times.append((time.perf_counter() - begin) / steps)
    return float(np.median(times))


def _arguments(case: dict[str, Any], shapes: Any, info: Any) -> Any:
    """Weights of the usual deviations, and rows of several sentences, each device's part alone."""
    (state, batch, _), (state_info, batch_info, key_info) = shapes, info
    length = case.get("length", LENGTH)
    each = length // SENTENCES
    vocabulary = config_of(case).target_vocab
    made = []
    for number, name in enumerate(Batch._fields):
        kind = name.rsplit("_", 1)[-1]
        shape, sharding = batch[number].shape, batch_info[number].sharding
        made.append(_row_maker(kind, shape, each, vocabulary, sharding)(number))
    leaves, tree = jax.tree.flatten(state)
    weights = set(map(id, jax.tree.leaves(state.model)))
    filled = [
        _leaf_maker(leaf.shape, leaf.dtype, id(leaf) in weights, at.sharding)(number)
        for number, (leaf, at) in enumerate(zip(leaves, jax.tree.leaves(state_info), strict=True))
    ]
    key = jax.jit(lambda: jax.random.key(1), out_shardings=key_info.sharding)()
    return tree.unflatten(filled), Batch(*made), key


@functools.cache  # one program for all leaves of a shape
def _leaf_maker(shape: Any, dtype: Any, weight: bool, sharding: Any) -> Any:
    """Makes a weight of random numbers, a norm's ones or zeros, or an optimizer's zeros."""

    def make(number: Any) -> Any:
        if not weight:
            return jnp.zeros(shape, dtype)
        if len(shape) < 2:
            return jnp.broadcast_to(1 - number % 2, shape).astype(dtype)
        bits = hashed_bits(jnp.stack([number, 5]).astype(jnp.uint32), shape).astype(jnp.float32)
        return ((bits * 2.0**-31 - 1.0) * 1.7 * shape[-2] ** -0.5).astype(dtype)

    return jax.jit(make, out_shardings=sharding)


@functools.cache
def _row_maker(kind: str, shape: Any, each: int, vocabulary: int, sharding: Any) -> Any:
    """Makes segments or positions of sentences of `each` tokens, or random tokens."""

    def make(number: Any) -> Any:
        places = jnp.arange(shape[1])
        if kind in ("segments", "positions"):
            line = places // each + 1 if kind == "segments" else places % each
            return jnp.broadcast_to(line, shape).astype(jnp.int32)
        bits = hashed_bits(jnp.stack([number, 9]).astype(jnp.uint32), shape)
        return (bits % jnp.uint32(vocabulary - 3)).astype(jnp.int32) + 3

    return jax.jit(make, out_shardings=sharding)


def forecast(case: dict[str, Any]) -> dict[str, Any]:
    """The same step on H200s, from a machine that need not have any: without its collectives."""
    low, _ = lowered({**case, "partitioner": "gshard"}, case["devices"], "h200")
    found = low.forecast("h200")
    alone = found.step_seconds - found.exposed_seconds
    tokens = case["tokens"] * case["devices"]
    flops = step_flops(config_of(case), tokens, tokens) / case["devices"]
    sent = {c.kind: 0 for c in low.collectives}
    exposed = dict(sent)
    for collective in low.collectives:
        sent[collective.kind] += collective.total_bytes
        if not collective.overlapped_with:
            exposed[collective.kind] += collective.total_bytes
    return {
        "forecast_ms": 1e3 * alone,
        "forecast_links_ms": 1e3 * (found.exposed_seconds + found.hidden_seconds),
        "forecast_exposed_ms": 1e3 * found.exposed_seconds,
        "forecast_gb": found.memory_bytes / 1e9,
        "forecast_share": flops / alone / PEAK,
        "forecast_sent_gb": sum(sent.values()) / 1e9,
        "forecast_exposed_gb": sum(exposed.values()) / 1e9,
        "forecast_all_to_all_gb": sent.get("all_to_all", 0) / 1e9,
        "forecast_all_to_all_exposed_gb": exposed.get("all_to_all", 0) / 1e9,
        "forecast_text": text_hash(low),
        "forecast_jax": jax.__version__,
    }
