"""A release for CTranslate2, of a model without experts.

The model is described by CTranslate2's own specification and not by way of Hugging Face's layout:
it has two vocabularies, an epsilon of layer normalization and a table of positions, so that nothing
has to be bent. `source.spm` and `target.spm` make pieces of text; a model of several targets reads
a tag such as `<2de>` before them, and `</s>` is added behind by CTranslate2.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ctranslate2.specs import TransformerSpec

from gshard.mt import atomic
from gshard.mt.errors import UserError
from gshard.mt.release.huggingface import inexpressible, layers_of
from gshard.mt.release.make import CARD, card
from gshard.mt.run import Run
from gshard.mt.training.loading import load_model
from gshard.nn.config import EPSILON
from gshard.nn.layers import sinusoids
from gshard.nn.transformer import Transformer

_POSITIONS = 2048


def export(run: Run, out: Path, which: str = "best") -> Path:
    """Write a run or release as a folder that `ctranslate2.Translator` loads, in float32."""
    if out.exists():
        raise UserError(f"{out} exists already; a release goes to a new folder")
    if run.model_config.experts:
        raise UserError(f"{run.folder} has experts, which CTranslate2 does not support")
    if reason := inexpressible(run.model_config):
        raise UserError(f"{run.folder} cannot be expressed in CTranslate2: {reason}")
    model, step = load_model(run, which)
    spec = specification(model)
    tokenizer = run.tokenizer
    spec.register_source_vocabulary(tokenizer.spell_source(range(tokenizer.source_size)))
    spec.register_target_vocabulary(tokenizer.spell_target(range(tokenizer.target_size)))
    spec.config.add_source_eos = True
    spec.config.layer_norm_epsilon = EPSILON
    spec.validate()
    spec.optimize(quantization=None)
    count = sum(leaf.size for leaf in jax.tree.leaves(model))
    with atomic.new_folder(out) as part:
        spec.save(str(part))
        for side, pieces in zip(("source", "target"), tokenizer.models, strict=True):
            (part / f"{side}.spm").write_bytes(pieces)
        size = (part / "model.bin").stat().st_size
        text = card(run, step, count, size, "float32")
        (part / CARD).write_text(text, encoding="utf-8")
    return out


def specification(model: Transformer) -> Any:
    """The model in CTranslate2's terms."""
    c = model.config
    spec = TransformerSpec.from_config((c.encoder_layers, c.decoder_layers), c.heads)
    spec.encoder.embeddings[0].weight = _floats(model.source.table)
    spec.decoder.embeddings.weight = _floats(model.target.table)
    spec.decoder.projection.weight = _floats(model.target.table)
    positions = sinusoids(jnp.arange(_POSITIONS)[None], c.model_dim)[0]
    for stack, pairs, norm in (
        (spec.encoder, model.encoder, model.encoder_norm),
        (spec.decoder, model.decoder, model.decoder_norm),
    ):
        stack.position_encodings.encodings = _floats(positions)
        _norm(stack.layer_norm, norm)
        for into, layer in zip(stack.layer, layers_of(pairs, c.stacked), strict=True):
            _layer(into, layer)
    return spec


def _layer(into: Any, layer: Any) -> None:
    _norm(into.self_attention.layer_norm, layer.self_norm)
    own = layer.self_attention
    _linear(into.self_attention.linear[0], *(_flat(w) for w in (own.wq, own.wk, own.wv)))
    _linear(into.self_attention.linear[1], _back(own.wo))
    if layer.cross_attention is not None:
        cross = layer.cross_attention
        _norm(into.attention.layer_norm, layer.cross_norm)
        _linear(into.attention.linear[0], _flat(cross.wq))
        _linear(into.attention.linear[1], _flat(cross.wk), _flat(cross.wv))
        _linear(into.attention.linear[2], _back(cross.wo))
    _norm(into.ffn.layer_norm, layer.feed_forward_norm)
    _linear(into.ffn.linear_0, _floats(layer.feed_forward.wi))
    _linear(into.ffn.linear_1, _floats(layer.feed_forward.wo))


def _linear(into: Any, *weights: np.ndarray) -> None:
    """Weights [in, out], side by side; CTranslate2 has [out, in]."""
    into.weight = np.ascontiguousarray(np.concatenate(weights, axis=1).T)
    into.bias = np.zeros(len(into.weight), np.float32)


def _norm(into: Any, norm: Any) -> None:
    into.gamma, into.beta = _floats(norm.scale), _floats(norm.bias)


def _flat(w_MND: Any) -> np.ndarray:
    return _floats(w_MND).reshape(len(w_MND), -1)


def _back(w_NUM: Any) -> np.ndarray:
    return _floats(w_NUM).reshape(-1, w_NUM.shape[-1])


def _floats(array: Any) -> np.ndarray:
    return np.asarray(array, np.float32)
