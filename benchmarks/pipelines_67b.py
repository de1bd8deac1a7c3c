"""A step of a 67B-A2B Mixture of Experts on 64 H100s in 8 stages: `benchmarks.pipelines --big`.

The shapes are those of marin's issues 6044 and 7024 (Snowball): 26 layers, 2560 wide, 20 heads on 5
of keys and values, 256 experts of 1280, 4 for a token, and a shared one; 256 sequences of 8192
tokens in 32 microbatches, rematerialized, weights in bfloat16. Published, on 64 H100s: 603,327
tokens a second by JaxPP (PP8 x EP8, DualPipeV, an own runtime for each stage), and 271,405 without
stages (FSDP8 x EP8, a batch of 64). Not in this model: gated norms, the removal of what is parallel
to V, and sliding windows.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

import gshard
from benchmarks.expert_meshes import slots
from gshard.graph.readable import size
from gshard.nn.flash import Segments, flash_attention

LAYERS, B, S, M, HEADS, KEYS, H = 26, 256, 8192, 2560, 20, 5, 128
E, F, K, V = 256, 1280, 4, 128_256
DEVICES, STAGES, MICROBATCHES = 64, 8, 32
CAPACITY = 5 * K * S // (4 * E)  # a quarter more than an expert's share of a sequence
PUBLISHED = {"JaxPP, PP8 x EP8": 603_327, "FSDP8 x EP8": 271_405}


def norm(x, gain):
    square = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    return (x * jax.lax.rsqrt(square + 1e-6).astype(x.dtype)) * gain


def attention(x_BSM, w):
    """Causal, by gshard's kernel; a head of keys and values is shared by 4 of queries."""
    q, k, v = (jnp.einsum("bsm,mnh->bsnh", x_BSM, w[name]) for name in "qkv")
    k, v = (jnp.repeat(a, HEADS // KEYS, axis=2) for a in (k, v))
    ones = jnp.ones(x_BSM.shape[:2], jnp.int32)
    seed = jnp.zeros(2, jnp.uint32)
    y = flash_attention(q, k, v, Segments(ones, ones, causal=True), 0.0, seed)
    return jnp.einsum("bsnh,nhm->bsm", y, w["out"])


def experts(x_GSM, w, per_stage: int):
    """The best `K` experts of each token, weighed by sigmoids; tokens move by index, not by masks.

    A group is a sequence. The devices of a stage have a group each, and `E / per_stage` experts.
    """
    w = {**w, **{name: gshard.split(w[name], 0, per_stage) for name in ("into", "up", "down")}}
    G = len(x_GSM)
    gates_GSE = jnp.einsum("gsm,me->gse", x_GSM, w["gate"]).astype(jnp.float32)
    best_GSK, expert_GSK = jax.lax.top_k(gates_GSE, K)
    chosen_GL, real_GL = slots(expert_GSK, E, CAPACITY)
    sent = jnp.take_along_axis(x_GSM, (chosen_GL // K)[..., None], 1)
    sent = (sent * real_GL[..., None].astype(x_GSM.dtype)).reshape(G, E, CAPACITY, M)
    sent_GECM = gshard.split(gshard.split(sent, 0, per_stage), 1, per_stage)
    gate, up = (jnp.einsum("gecm,emf->gecf", sent_GECM, w[name]) for name in ("into", "up"))
    back = jnp.einsum("gecf,efm->gecm", jax.nn.silu(gate) * up, w["down"])
    back_GLM = gshard.split(back, 0, per_stage).reshape(G, -1, M)
    weight_GT = jax.nn.sigmoid(best_GSK).reshape(G, S * K).astype(x_GSM.dtype)
    weight_GL = jnp.take_along_axis(weight_GT, chosen_GL, -1)
    zeros = jnp.zeros_like(x_GSM)
    return jax.vmap(lambda y, rows, values: y.at[rows].add(values))(
        zeros, chosen_GL // K, back_GLM * weight_GL[..., None]
    )


def block(w, x_BSM):
    per_stage = DEVICES // STAGES
    x_BSM = gshard.split(x_BSM, 0, per_stage)
    x_BSM = x_BSM + attention(norm(x_BSM, w["norm1"]), w)
    y_BSM = norm(x_BSM, w["norm2"])
    shared = jax.nn.silu(y_BSM @ w["shared_into"]) * (y_BSM @ w["shared_up"])
    return x_BSM + experts(y_BSM, w, per_stage) + shared @ w["shared_down"]


def loss(params, tokens, labels, schedule: str, remat: bool):
    def head(y, labels):
        logits = (norm(y, params["norm"]) @ params["head"]).astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
        return jnp.sum(jax.nn.logsumexp(logits, -1) - chosen) / (B * S)

    x = gshard.split(params["embed"][gshard.split(tokens, 0, DEVICES)], 0, DEVICES)
    how = {"stages": STAGES, "microbatches": MICROBATCHES, "schedule": schedule}
    layer = jax.checkpoint(block) if remat else block
    return gshard.pipeline(layer, params["layers"], x, head=head, targets=labels, **how)


def shapes() -> tuple[Any, ...]:
    def of(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    layer = {"norm1": (M,), "norm2": (M,), "q": (M, HEADS, H), "k": (M, KEYS, H),
             "v": (M, KEYS, H), "out": (HEADS, H, M), "gate": (M, E),
             "into": (E, M, F), "up": (E, M, F), "down": (E, F, M), "shared_into": (M, M),
             "shared_up": (M, M), "shared_down": (M, M)}  # fmt: skip
    layers = {name: of(LAYERS, *shape) for name, shape in layer.items()}
    params = {"layers": layers, "norm": of(M), "head": of(M, V), "embed": of(V, M)}
    tokens = jax.ShapeDtypeStruct((B, S), jnp.int32)
    return params, tokens, tokens


def main(compiled: bool = False, schedule: str = "auto", remat: bool = True) -> None:
    """The forecast of a step beside what is published; or XLA's memory of one device, on CPUs."""
    if compiled:
        jax.config.update("jax_num_cpu_devices", DEVICES)
    optimizer = optax.adam(1e-4, mu_dtype=jnp.bfloat16)

    def step(params, state, tokens, labels):
        value, grads = jax.value_and_grad(loss)(params, tokens, labels, schedule, remat)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params, *batch = shapes()
    count = sum(a.size for a in jax.tree.leaves(params))
    begin, devices = time.perf_counter(), jax.devices() if compiled else DEVICES
    jitted = gshard.jit(step, devices=devices, hardware="h100", donate_argnums=(0, 1))
    lowered = jitted.lower(params, jax.eval_shape(optimizer.init, params), *batch)
    print(f"{count / 1e9:.1f}B weights; lowered in {time.perf_counter() - begin:.0f} s")
    forecast = lowered.forecast("h100")
    print(forecast)
    print(f"\n| step on {DEVICES} H100s | tokens a second |\n|---|---:|")
    print(f"| forecast, {lowered.pipelines[0].schedule} | {B * S / forecast.step_seconds:,.0f} |")
    for name, rate in PUBLISHED.items():
        print(f"| published, {name} | {rate:,} |")
    if compiled:
        begin = time.perf_counter()
        memory = lowered.compile({"xla_backend_optimization_level": 0}).memory_analysis()
        spent = time.perf_counter() - begin
        print(f"compiled for a device (CPU) in {spent:.0f} s: {size(memory.temp_size_in_bytes)} "
              "temporary")  # fmt: skip
