"""The arithmetic per token, by which the share of peak performance is measured."""

from __future__ import annotations

from gshard.nn.config import TransformerConfig


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
