"""A decoder-only Transformer in stages: `python -m examples.pipelines --stages 4 --train 20`.

The model is the recipes' (`examples/recipes/transformer.py`), which knows nothing of stages. With
`--experts`, every hidden layer is a Mixture of Experts as the paper's, whose experts are on the
devices of a stage. Without `--train`, it prints the schedule and a forecast; no device is needed.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gshard
from examples.recipes.transformer import Params, Size, attention, norm, shapes, stacked, tokens

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m examples.pipelines")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--schedule", default="auto")
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--train", type=int, default=0, help="steps, on 8 virtual devices")
    chosen = parser.parse_args()
    size = Size(L=8, B=32, S=32, M=64, N=4, F=256, V=256)
    params = stacked(shapes(size))
    if chosen.experts:
        params = with_experts(params, chosen.experts)

    def step(params, batch):
        how = (chosen.stages, chosen.microbatches, chosen.schedule)
        value, grads = jax.value_and_grad(loss)(params, batch, *how)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    if not chosen.train:
        lowered = gshard.jit(step, devices=DEVICES).lower(params, tokens(size))
        print(lowered.pipelines[0], lowered.forecast(chosen.hardware), sep="\n\n")
        return
    jax.config.update("jax_num_cpu_devices", DEVICES)
    run, weights = gshard.jit(step), jax.tree.map(initial, params)
    batch = np.arange(size.B * (size.S + 1)).reshape(size.B, -1) % size.V
    for number in range(chosen.train):
        weights, value = run(weights, batch)
        print(f"step {number}: loss {float(value):.4f}")


if __name__ == "__main__":
    main()
