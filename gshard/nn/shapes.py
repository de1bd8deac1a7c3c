"""What follows from a configuration, without JAX: shapes of weights, arithmetic, remat."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import get_args

from gshard.nn.config import Remat, TransformerConfig

Shape = tuple[int, ...]


def weight_shapes(c: TransformerConfig) -> dict[str, Shape]:
    """The shape of every array of a `Transformer`, by its path in the model."""
    M = c.model_dim
    found: dict[str, Shape] = {
        "source.table": (c.source_vocab, M),
        "target.table": (c.target_vocab, M),
    }
    for stack, layers in (("encoder", c.encoder_layers), ("decoder", c.decoder_layers)):
        cross, every = stack == "decoder", c.experts_every // 2  # pairs
        for n in range(1 if c.stacked and layers else layers // 2):
            pair, leading = (f"{stack}", (layers // 2,)) if c.stacked else (f"{stack}.{n}", ())
            placed = c.stacked or n % every == every - 1
            for kind, sparse in (("dense", False), ("sparse", placed)):
                for name, shape in _layer(c, sparse=sparse, cross=cross):
                    found[f"{pair}.{kind}.{name}"] = (*leading, *shape)
    for stack in ("encoder", "decoder"):
        found |= {f"{stack}_norm.{leaf}": (M,) for leaf in ("scale", "bias")}
    return found


def _layer(c: TransformerConfig, *, sparse: bool, cross: bool) -> Iterator[tuple[str, Shape]]:
    M = c.model_dim
    hidden = c.expert_hidden_dim if sparse and c.expert_hidden_dim else c.hidden_dim
    if sparse and cross and c.experts and c.experts_in == "encoder":
        hidden, sparse = c.gating.top_k * hidden + c.shared_hidden_dim, False
    for kind in ("self", "cross") if cross else ("self",):
        yield from _norm(c, kind)
        heads = {"q": (c.heads, c.key_dim), "k": (c.heads, c.key_dim), "v": (c.heads, c.value_dim)}
        for name, outputs in heads.items():
            yield f"{kind}_attention.w{name}", (M, *outputs)
            if c.biases:
                yield f"{kind}_attention.b{name}", outputs
        yield f"{kind}_attention.wo", (*heads["v"], M)
        if c.biases:
            yield f"{kind}_attention.bo", (M,)
    yield from _norm(c, "feed_forward")
    if sparse and c.experts:
        yield "moe.gate", (M, c.experts)
        yield from _products(c, "moe.experts", hidden, (c.experts,))
        hidden = c.shared_hidden_dim
    if hidden:
        yield from _products(c, "feed_forward", hidden, ())


def _norm(c: TransformerConfig, name: str) -> Iterator[tuple[str, Shape]]:
    yield f"{name}_norm.scale", (c.model_dim,)
    yield f"{name}_norm.bias", (c.model_dim,)


def _products(
    c: TransformerConfig, name: str, hidden: int, leading: Shape
) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.wi", (*leading, c.model_dim, hidden)
    yield f"{name}.wo", (*leading, hidden, c.model_dim)
    if c.biases:
        yield f"{name}.bi", (*leading, hidden)
        yield f"{name}.bo", (*leading, c.model_dim)


def forward_flops(config: TransformerConfig) -> tuple[int, int]:
    """Multiplications and additions for one source token and for one target token.

    Only products with weights count, which is the useful work: a token visits `top_k` experts
    however many slots their buffers have, and scores between tokens are left out, since they
    depend on how sentences are packed.
    """
    c = config
    attention = c.model_dim * c.heads * 2 * (c.key_dim + c.value_dim)
    dense = 2 * c.model_dim * c.hidden_dim
    hidden = c.expert_hidden_dim or c.hidden_dim
    sparse = 2 * c.model_dim * hidden * (c.gating.top_k if c.experts else 1)
    shared = 2 * c.model_dim * c.shared_hidden_dim if c.experts else 0
    gate = c.model_dim * c.experts
    pair = dense + sparse + shared + gate
    decoder_pair = pair - gate if c.experts_in == "encoder" else pair
    source = c.encoder_layers // 2 * (2 * attention + pair)
    # The decoder's keys and values of the source are made from source tokens.
    cross_source = c.decoder_layers * attention // 2
    target = c.decoder_layers // 2 * (3 * attention + decoder_pair) + c.model_dim * c.target_vocab
    return 2 * (source + cross_source), 2 * target


def step_flops(config: TransformerConfig, source_tokens: float, target_tokens: float) -> float:
    """A training step's: the backward pass does twice the work of the forward pass."""
    source, target = forward_flops(config)
    return 3.0 * (source * source_tokens + target * target_tokens)


def choose_remat(remat: Remat | int, memory: Callable[[Remat], int]) -> Remat:
    """A config's `remat`, or for a budget in bytes the cheapest setting that fits in it.

    `memory` says how many bytes a step holds on each device under a setting, such as
    `gshard.jit(step).lower(...).forecast().memory_bytes` of a `train_step` with this `remat`.
    """
    if not isinstance(remat, int):
        return remat
    settings: tuple[Remat, ...] = get_args(Remat)  # the fastest first
    for setting in settings:
        if (needed := memory(setting)) <= remat:
            return setting
    raise ValueError(
        f"a step holds about {needed:,} bytes on each device even with rematerialization, but "
        f"remat={remat:,}: use more devices, a smaller batch or bfloat16"
    )
