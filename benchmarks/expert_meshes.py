"""FSDP x experts x HSDP at the shapes of Qwen3-30B-A3B, DeepSeek-V3 and marin's 67B-A2B.

    python -m benchmarks.expert_meshes             the tables of docs/howto/expert-meshes.md
    python -m benchmarks.expert_meshes --only Qwen one model

Tokens and dense weights are over all devices, experts over the 8 of a node, and the model dim of
their weights over the nodes; under HSDP, over the nodes of a group, with copies in the others. A
layer is rematerialized, layers are in a scan, weights are in bfloat16, experts have a capacity of
1.25. Lowered and forecast, never run. Published figures are of NousResearch/torchtitan 19 (DeepEP,
experts over 8) and of marin 7024 (plain JAX, FSDP 8 x EP 8). Left out: rotary embeddings, norms of
queries and keys, auxiliary losses, the optimizer's state, and DeepSeek's three dense layers, which
have experts here.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import gshard
from examples.recipes.recipe import all_gather, all_reduce, all_to_all, nbytes, reduce_scatter
from gshard.graph.readable import size
from gshard.nn.flash import Segments, flash_attention

NODE = 8  # devices, each of which has so many of all experts
Weights = dict[str, Any]


class Model(NamedTuple):
    """The sizes of a model, as published."""

    name: str
    layers: int
    M: int
    heads: int
    keys: int  # heads of keys and values
    H: int  # of a head
    E: int
    F: int  # of an expert
    K: int  # experts of a token
    shared: int  # hidden units of the experts that every token has
    V: int
    latent: tuple[int, int] | None = None  # of queries, and of keys and values
    S: int = 4096  # tokens of a sequence

    @property
    def capacity(self) -> int:
        """A quarter more than an expert's share of a sequence."""
        return 5 * self.K * self.S // (4 * self.E)


QWEN = Model("Qwen3-30B-A3B", 48, 2048, 32, 4, 128, 128, 768, 8, 0, 151_936)
DEEPSEEK = Model("DeepSeek-V3", 61, 7168, 128, 128, 128, 256, 2048, 8, 2048, 129_280, (1536, 512))

MARIN = Model("67B-A2B", 26, 2560, 20, 5, 128, 256, 1280, 4, 2560, 128_256, S=8192)


class Run(NamedTuple):
    """A model on devices, with `sequences` on each; copies of all weights are `copies`."""

    model: Model
    hardware: str
    devices: int
    sequences: int
    copies: int = 1
    exchange: bool = False  # whether dispatched tokens are annotated too, by expert within a node
    published: str = ""

    @property
    def mesh(self) -> np.ndarray:
        """The nodes of a group, and the devices of each."""
        return np.arange(self.devices // self.copies).reshape(-1, NODE)


RUNS = [
    Run(QWEN, "b200", 8, 8),
    Run(QWEN, "b200", 8, 8, exchange=True, published="14,796"),
    Run(QWEN, "b200", 64, 8),
    Run(QWEN, "b200", 64, 8, exchange=True, published="14,107"),
    Run(QWEN, "b200", 128, 8, copies=2),
    Run(QWEN, "b200", 128, 8, copies=2, exchange=True, published="13,856"),
    Run(MARIN, "h100", 64, 1, exchange=True, published="4,241"),
    Run(MARIN, "h100", 64, 4, exchange=True, published="out of memory"),
    Run(DEEPSEEK, "h100", 512, 1),
    Run(DEEPSEEK, "h100", 512, 1, exchange=True),
    Run(DEEPSEEK, "h100", 1024, 1, copies=2, exchange=True),
]


def norm(x, gain):
    square = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    return (x * jax.lax.rsqrt(square + 1e-6).astype(x.dtype)) * gain


def attention(x_GSM, w: Weights, model: Model):
    """Causal; keys and values of few heads, or all three from short vectors."""
    if model.latent:
        short, pair = x_GSM @ w["q_down"], x_GSM @ w["kv_down"]
        of = {"q": short, "k": pair, "v": pair}
        q, k, v = (jnp.einsum("gsl,lnh->gsnh", a, w[name]) for name, a in of.items())
    else:
        q, k, v = (jnp.einsum("gsm,mnh->gsnh", x_GSM, w[name]) for name in "qkv")
    k, v = (jnp.repeat(a, model.heads // model.keys, axis=2) for a in (k, v))
    ones = jnp.ones(x_GSM.shape[:2], jnp.int32)
    y = flash_attention(q, k, v, Segments(ones, ones, causal=True), 0.0, jnp.zeros(2, jnp.uint32))
    return jnp.einsum("gsnh,nhm->gsm", y, w["out"])


def slots(expert_GSK, E: int, C: int):
    """The token of each slot of each expert, by number in S x K; and which slots are used."""
    G, S, K = expert_GSK.shape
    expert_GT = expert_GSK.reshape(G, S * K)
    order_GT = jnp.argsort(expert_GT, -1, stable=True)
    sorted_GT = jnp.take_along_axis(expert_GT, order_GT, -1)
    starts_GE = jax.vmap(lambda a: jnp.searchsorted(a, jnp.arange(E)))(sorted_GT)
    place_GL = jnp.clip(starts_GE[..., None] + jnp.arange(C), 0, S * K - 1).reshape(G, -1)
    used_GL = jnp.take_along_axis(sorted_GT, place_GL, -1) == jnp.arange(E * C) // C
    return jnp.take_along_axis(order_GT, place_GL, -1), used_GL


def experts(x_GSM, w: Weights, run: Run):
    """The best experts of each token, within a sequence; tokens move by index, not by masks."""
    model, G = run.model, len(x_GSM)
    S, E, K, C = model.S, model.E, model.K, model.capacity
    gates_GSE = jnp.einsum("gsm,me->gse", x_GSM, w["gate"]).astype(jnp.float32)
    best_GSK, expert_GSK = jax.lax.top_k(gates_GSE, K)
    chosen_GL, real_GL = slots(expert_GSK, E, C)
    sent_GLM = jnp.take_along_axis(x_GSM, (chosen_GL // K)[..., None], 1)
    sent_GECM = (sent_GLM * real_GL[..., None].astype(x_GSM.dtype)).reshape(G, E, C, -1)
    if run.exchange:
        nodes = np.arange(run.devices).reshape(-1, NODE, 1, 1)
        sent_GECM = gshard.shard(gshard.split(sent_GECM, 0, run.devices), nodes)
    gate, up = (jnp.einsum("gecm,emf->gecf", sent_GECM, w[name]) for name in ("into", "up"))
    back_GECM = jnp.einsum("gecf,efm->gecm", jax.nn.silu(gate) * up, w["down"])
    back_GLM = gshard.split(back_GECM, 0, run.devices).reshape(G, E * C, -1)
    weight_GL = jnp.take_along_axis(jax.nn.softmax(best_GSK).reshape(G, S * K), chosen_GL, -1)
    added_GLM = back_GLM * (weight_GL * real_GL).astype(x_GSM.dtype)[..., None]
    return jax.vmap(lambda y, rows, values: y.at[rows].add(values))(
        jnp.zeros_like(x_GSM), chosen_GL // K, added_GLM
    )


def block(x_GSM, w: Weights, run: Run):
    x_GSM = x_GSM + attention(norm(x_GSM, w["norm1"]), w, run.model)
    y_GSM = norm(x_GSM, w["norm2"])
    x_GSM = x_GSM + experts(y_GSM, w, run)
    if run.model.shared:
        hidden = jax.nn.silu(y_GSM @ w["shared_into"]) * (y_GSM @ w["shared_up"])
        x_GSM = x_GSM + hidden @ w["shared_down"]
    return x_GSM


def annotated(weights: Weights, run: Run) -> Weights:
    """The four annotations, that of the tokens is in `step`."""
    mesh = run.mesh

    def one(path: Any, w: Any) -> Any:
        name, layers = path[-1].key, len(path) > 1
        if name in ("into", "up", "down"):  # (layers, experts, ., .)
            return gshard.shard(w, mesh.T.reshape(1, NODE, -1, 1))
        dim = int(np.argmax(w.shape[layers:])) + layers
        tiles = [mesh.size if d == dim else 1 for d in range(w.ndim)]
        return gshard.shard(w, mesh.reshape(tiles)) if w.shape[dim] % mesh.size == 0 else w

    return jax.tree_util.tree_map_with_path(one, weights)


def step_of(run: Run) -> Callable:
    """A step of gradient descent."""

    def loss(weights, tokens_GS):
        x_GSM = gshard.split(weights["embed"][tokens_GS], 0, run.devices)
        layer = jax.checkpoint(lambda x, w: (block(x, w, run), None))
        x_GSM, _ = jax.lax.scan(layer, x_GSM, weights["layers"])
        logits = (norm(x_GSM, weights["norm"]) @ weights["head"]).astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, tokens_GS[..., None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)

    def step(weights, tokens_GS):
        weights = annotated(weights, run)
        value, grads = jax.value_and_grad(loss)(weights, gshard.split(tokens_GS, 0, run.devices))
        return jax.tree.map(lambda w, g: w - jnp.bfloat16(1e-3) * g, weights, grads), value

    return step


def shapes(run: Run) -> tuple[Weights, jax.ShapeDtypeStruct]:
    """The weights and a batch."""
    _, layers, M, heads, keys, H, E, F, _, shared, V, latent, S = run.model
    of = {"norm1": (M,), "norm2": (M,), "out": (heads, H, M), "gate": (M, E), "into": (E, M, F),
          "up": (E, M, F), "down": (E, F, M)}  # fmt: skip
    if latent:
        long, pair = latent
        of |= {"q_down": (M, long), "kv_down": (M, pair), "q": (long, heads, H),
               "k": (pair, heads, H), "v": (pair, heads, H)}  # fmt: skip
    else:
        of |= {"q": (M, heads, H), "k": (M, keys, H), "v": (M, keys, H)}
    if shared:
        of |= {"shared_into": (M, shared), "shared_up": (M, shared), "shared_down": (shared, M)}

    def weight(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    weights = {"embed": weight(V, M), "head": weight(M, V), "norm": weight(M),
               "layers": {name: weight(layers, *shape) for name, shape in of.items()}}  # fmt: skip
    return weights, jax.ShapeDtypeStruct((run.sequences * run.devices, S), jnp.int32)


def by_hand(run: Run, weights: Weights) -> tuple[float, float]:
    """What a device sends in programs written by hand: tokens to experts, or experts to tokens.

    Weights of layers are gathered forwards and for the recomputation, gradients are scattered, and
    summed over the copies. Tokens go to the experts and back, in the recomputation too, and so do
    their gradients; or the experts of a layer are gathered as its other weights are.
    """
    mesh, model, layers = run.mesh, run.model, weights["layers"]
    routed = sum(nbytes(layers[name]) for name in ("into", "up", "down"))
    dense, ends = nbytes(layers) - routed, nbytes([weights["embed"], weights["head"]])
    nodes, group = len(mesh), mesh.size
    shared = 2 * all_gather(dense, group) + reduce_scatter(dense, group)
    shared += all_gather(ends, group) + reduce_scatter(ends, group)
    shared += all_reduce((dense + routed + ends) / group, run.copies)
    moved = run.sequences * model.E * model.capacity * model.M * 2
    within = 2 * all_gather(routed / NODE, nodes) + reduce_scatter(routed / NODE, nodes)
    every = 2 * all_gather(routed, group) + reduce_scatter(routed, group)
    return shared + within + 6 * model.layers * all_to_all(moved, NODE), shared + every


def row(run: Run, verbose: bool = False) -> str:
    """A row of the table."""
    begin = time.perf_counter()
    weights, batch = shapes(run)
    jitted = gshard.jit(step_of(run), devices=run.devices, hardware=run.hardware, donate_argnums=0)
    lowered = jitted.lower(weights, batch)
    sent = sum(c.total_bytes for c in lowered.collectives)
    tokens, experts = by_hand(run, weights)
    hand = tokens if run.exchange else min(tokens, experts)
    found = lowered.forecast(run.hardware)
    rate = run.sequences * run.model.S / found.step_seconds
    if verbose:
        print(*lowered.collectives, sep="\n")
        print(f"lowered in {time.perf_counter() - begin:.0f} s")
    mesh = "x".join(map(str, (run.copies, *run.mesh.shape) if run.copies > 1 else run.mesh.shape))
    cells = [
        run.model.name, f"{run.devices} {run.hardware}", mesh, str(run.sequences),
        "5" if run.exchange else "4", f"{tokens / 1e9:,.0f} GB", f"{experts / 1e9:,.0f} GB",
        f"{sent / hand:.2f}", size(found.memory_bytes), f"{rate:,.0f}", run.published or "—",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--devices", type=int, help="runs on so many devices alone")
    parser.add_argument("--verbose", action="store_true", help="print every collective")
    options = parser.parse_args()
    titles = ["model", "devices", "mesh", "sequences", "annotations", "tokens move", "experts move",
              "gshard", "memory", "tokens/s each", "published"]  # fmt: skip
    print(f"| {' | '.join(titles)} |\n|---|---|---|{'---:|' * (len(titles) - 3)}")
    for run in RUNS:
        if options.only in run.model.name and options.devices in (None, run.devices):
            print(row(run, options.verbose), flush=True)


if __name__ == "__main__":
    main()
