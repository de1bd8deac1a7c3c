"""The names and shapes of a model's weights, from its configuration alone and without JAX."""

from __future__ import annotations

from collections.abc import Iterator

from gshard.nn.config import TransformerConfig

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
