"""Transformers in stages: `python -m examples.pipelines --stages 4 --train 20`.

The model is the recipes' decoder (`examples/recipes/transformer.py`), which knows nothing of
stages. With `--experts`, every hidden layer is a Mixture of Experts, whose experts are on the
devices of a stage. With `--paper`, it is the paper's MoE Transformer (`gshard.nn`): an encoder and
a decoder, each a pipeline of pairs of layers. Without `--train`, it prints the schedules and a
forecast; no device is needed.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gshard
from examples.recipes.transformer import Params, Size, attention, norm, shapes, stacked, tokens
from gshard.nn import Batch, Strategy, TransformerConfig, adam, init_state, train_step

DEVICES = 8


def moe(x_BSM, layer, per_stage: int):
    """The best expert of every token, weighed by its gate; tokens within a capacity of 2."""
    x_TM = x_BSM.reshape(-1, x_BSM.shape[-1])
    experts = layer["gate"].shape[-1]
    gates_TE = jax.nn.softmax(x_TM @ layer["gate"])
    chosen_TE = jax.nn.one_hot(jnp.argmax(gates_TE, -1), experts)
    slots = 2 * len(x_TM) // experts
    place_TE = (jnp.cumsum(chosen_TE, 0) - 1) * chosen_TE
    mask_TEC = chosen_TE[..., None] * jax.nn.one_hot(place_TE.astype(int), slots)
    sent_ECM = gshard.split(jnp.einsum("TEC,TM->ECM", mask_TEC, x_TM), 0, per_stage)
    hidden_ECF = jax.nn.relu(jnp.einsum("ECM,EMF->ECF", sent_ECM, layer["up"]))
    back_ECM = jnp.einsum("ECF,EFM->ECM", hidden_ECF, layer["down"])
    return jnp.einsum("TEC,TE,ECM->TM", mask_TEC, gates_TE, back_ECM).reshape(x_BSM.shape)


def block(layer, x_BSM, per_stage: int = 1):
    """Attention, and a hidden layer or experts; the batch is split within a stage."""
    x_BSM = gshard.split(x_BSM, 0, per_stage)
    x_BSM = x_BSM + attention(norm(x_BSM, layer["norm1"]), layer)
    y_BSM = norm(x_BSM, layer["norm2"])
    if "gate" in layer:
        return x_BSM + moe(y_BSM, layer, per_stage)
    return x_BSM + jax.nn.gelu(y_BSM @ layer["up"]) @ layer["down"]


def loss(params: Params, batch, stages: int, microbatches: int, schedule: str):
    """Mean cross-entropy, summed by microbatch."""

    def layer(weights, x):
        return block(weights, x, DEVICES // stages)

    def head(y, labels):
        logits = norm(y, params["norm"]) @ params["head"]
        chosen = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
        return jnp.sum(jax.nn.logsumexp(logits, -1) - chosen) / batch[:, 1:].size

    x = params["embed"][batch[:, :-1]]
    how = {"stages": stages, "microbatches": microbatches, "schedule": schedule}
    return gshard.pipeline(layer, params["layers"], x, head=head, targets=batch[:, 1:], **how)


def with_experts(params: Params, experts: int) -> Params:
    """The shapes with `experts` hidden layers in the place of each."""
    layers = dict(params["layers"])
    for name in ("up", "down"):
        old = layers[name]
        layers[name] = jax.ShapeDtypeStruct((len(old), experts, *old.shape[1:]), old.dtype)
    depth, model = layers["norm1"].shape
    layers["gate"] = jax.ShapeDtypeStruct((depth, model, experts), jnp.float32)
    return params | {"layers": layers}


def initial(shape: Any) -> np.ndarray:
    """Small random weights."""
    rng = np.random.default_rng(shape.shape[-1])
    return (0.05 * rng.standard_normal(shape.shape)).astype(shape.dtype)


def paper(stages: int, microbatches: int, experts: int) -> tuple[Any, Any, Any]:
    """A step of the paper's model on state and batch, their shapes, and how they are made."""
    dims = {"model_dim": 64, "hidden_dim": 256, "heads": 4, "key_dim": 16, "value_dim": 16}
    layers = {"encoder_layers": 8, "decoder_layers": 8, "experts": experts, "groups": 32}
    config = TransformerConfig(source_vocab=256, target_vocab=256, **layers, **dims)
    optimizer = adam(1e-3)
    strategy = Strategy(DEVICES, stages=stages, microbatches=microbatches)

    def step(state, batch):
        key = jax.random.key(0)
        state, metrics = train_step(state, batch, key, optimizer=optimizer, strategy=strategy)
        return state, metrics.loss

    def made():
        numbers = 1 + jnp.arange(32 * 32).reshape(32, 32) % 255
        return init_state(config, optimizer, jax.random.key(1)), Batch.of(numbers, numbers[:, ::-1])

    return step, jax.eval_shape(made), made


def decoder(stages: int, microbatches: int, schedule: str, experts: int) -> tuple[Any, Any, Any]:
    """A step of the recipes' decoder on weights and tokens, their shapes, and how they are made."""
    size = Size(L=8, B=32, S=32, M=64, N=4, F=256, V=256)
    params = stacked(shapes(size))
    params = with_experts(params, experts) if experts else params

    def step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch, stages, microbatches, schedule)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    def made():
        batch = np.arange(size.B * (size.S + 1)).reshape(size.B, -1) % size.V
        return jax.tree.map(initial, params), batch

    return step, (params, tokens(size)), made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m examples.pipelines")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--schedule", default="auto")
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--paper", action="store_true", help="the paper's encoder and decoder")
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--train", type=int, default=0, help="steps, on 8 virtual devices")
    chosen = parser.parse_args()
    if chosen.paper:
        step, given, made = paper(chosen.stages, chosen.microbatches, chosen.experts or DEVICES)
    else:
        how = (chosen.stages, chosen.microbatches, chosen.schedule, chosen.experts)
        step, given, made = decoder(*how)
    if not chosen.train:
        lowered = gshard.jit(step, devices=DEVICES).lower(*given)
        print(*lowered.pipelines, lowered.forecast(chosen.hardware), sep="\n\n")
        return
    jax.config.update("jax_num_cpu_devices", DEVICES)
    run, (state, batch) = gshard.jit(step), made()
    for number in range(chosen.train):
        state, value = run(state, batch)
        print(f"step {number}: loss {float(value):.4f}")


if __name__ == "__main__":
    main()
