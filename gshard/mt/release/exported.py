"""Releases in the layouts of other tools: Hugging Face's and CTranslate2's.

Hugging Face has `NllbMoe`, or `M2M100` for a model without experts. `transformers` loads it without
gshard. Both classes have one table of embeddings, so the two vocabularies become one: the source's
ids, then the target's. Its `MarianTokenizer` has two SentencePiece models and writes the target
language as `>>de<<` before the text. How the layout is made to say what gshard's model does:

- Positions begin with 0 where the padding token has the id -1, and so `config.json` says; padding
  in batches is masked, and `generation_config.json` has an id that exists.
- `NllbMoe` drops no token where its capacity in evaluation is that of all tokens.
- All layers of a stack have one hidden size there: smaller ones are padded with zeros.
- Biases, which gshard's model has not, are zero. The source's ids are suppressed in generation.

What it cannot say: the epsilon of layer normalization is 1e-5 there, and 1e-6 here; logits differ
in the sixth digit. Models of other kinds are refused, with the reason.

For CTranslate2 a model without experts is described by CTranslate2's own specification: it has two
vocabularies, an epsilon of layer normalization and a table of positions, so that nothing has to be
bent. `source.spm` and `target.spm` make pieces of text; a model of several targets reads a tag such
as `<2de>` before them, and `</s>` is added behind by CTranslate2.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from gshard.errors import UserError
from gshard.mt import atomic
from gshard.mt.batching.tokenizer import END, PAD, START, UNKNOWN, Tokenizer
from gshard.mt.release.make import CARD, card
from gshard.mt.run import Run
from gshard.mt.training.loading import load_model
from gshard.mt.training.weights import count_of, has_experts, in_layer, named, write_weights
from gshard.nn.config import EPSILON, TransformerConfig
from gshard.nn.layers import sinusoids
from gshard.nn.transformer import Transformer

Load = Callable[[str], Any]  # an array by its name
VOCABULARY = "gshard_vocabulary.json"  # languages and directions, for `gshard import`
_WEIGHTS = "model.safetensors"
_SPECIAL = {PAD: "<target pad>", UNKNOWN: "<target unk>", START: "<target s>", END: "<target /s>"}
# What is the same for all models there.
LAYOUT = json.loads(Path(__file__).with_name("huggingface.json").read_text(encoding="utf-8"))
_POSITIONS = 1024  # of the table of positions; it grows when it has to


def export(run: Run, out: Path, which: str = "best") -> Path:
    """Write a run or release as a folder that `transformers` loads, in float32."""
    model, step = _expressible(run, out, which, "Hugging Face's layout")
    arrays = {name: np.asarray(array, np.float32) for name, array in renamed(model)}
    with atomic.new_folder(out) as part:
        write_weights(part / _WEIGHTS, arrays, {"format": "pt", "step": str(step)})
        _write_tokenizer(part, run.tokenizer)
        _write(part / "config.json", _config(run.model_config))
        _write(part / "generation_config.json", _generation(run.model_config))
        _write_card(part, run, model, step, part / _WEIGHTS, "huggingface.md")
    return out


def to_ctranslate2(run: Run, out: Path, which: str = "best") -> Path:
    """Write a run or release as a folder that `ctranslate2.Translator` loads, in float32."""
    if run.model_config.experts:
        raise UserError(f"{run.folder} has experts, which CTranslate2 does not support")
    model, step = _expressible(run, out, which, "CTranslate2")
    spec, tokenizer = specification(model), run.tokenizer
    spec.register_source_vocabulary(tokenizer.spell_source(range(tokenizer.source_size)))
    spec.register_target_vocabulary(tokenizer.spell_target(range(tokenizer.target_size)))
    spec.config.add_source_eos = True
    spec.config.layer_norm_epsilon = EPSILON
    spec.validate()
    spec.optimize(quantization=None)
    with atomic.new_folder(out) as part:
        spec.save(str(part))
        for side, pieces in zip(("source", "target"), tokenizer.models, strict=True):
            (part / f"{side}.spm").write_bytes(pieces)
        _write_card(part, run, model, step, part / "model.bin")
    return out


def _expressible(run: Run, out: Path, which: str, tool: str) -> tuple[Transformer, int]:
    """The model and its step, if another tool has a form for it and `out` is a new folder."""
    if out.exists():
        raise UserError(f"{out} exists already; a release goes to a new folder")
    if reason := inexpressible(run.model_config):
        raise UserError(f"{run.folder} cannot be expressed in {tool}: {reason}")
    return load_model(run, which)


def _write_card(
    folder: Path, run: Run, model: Transformer, step: int, weights: Path, form: str = "card.md"
) -> None:
    text = card(run, step, count_of(model), weights.stat().st_size, "float32", form)
    (folder / CARD).write_text(text, encoding="utf-8")


def renamed(model: Transformer) -> Iterator[tuple[str, np.ndarray]]:
    """The weights by the layout's names and in its shapes; biases are zero."""
    c, hidden = model.config, _hidden_dims(model.config)
    load: Load = named(model).__getitem__
    yield "model.shared.weight", np.concatenate([model.source.table, model.target.table])
    for side, n, ours, theirs in arrays_of(c):
        weight = load if n is None else in_layer(load, c, side, n)
        if ours.endswith("_norm"):
            yield f"{theirs}.weight", weight(f"{ours}.scale")
            yield f"{theirs}.bias", weight(f"{ours}.bias")
        elif ours == ROUTER:
            yield theirs, np.asarray(weight(ours)).T
        else:
            array = np.asarray(weight(ours.format("w")))
            for expert, one in enumerate(array) if "{}" in theirs else [(0, array)]:
                yield from _product(theirs.format(expert), one, hidden[side])


ROUTER = "moe.gate"


def arrays_of(c: TransformerConfig) -> Iterator[tuple[str, int | None, str, str]]:
    """Where the layout has gshard's arrays, beside the tables: the stack, the number of the layer
    (None of what is behind all), gshard's name in it, and the layout's.

    Normalizations have names that end with `_norm`. In those of products `{}` is the letter of a
    weight, [outputs, inputs] there, or bias, and in the layout's the number of an expert.
    """
    for side, count in (("encoder", c.encoder_layers), ("decoder", c.decoder_layers)):
        yield side, None, f"{side}_norm", f"model.{side}.layer_norm"
        for n in range(count):
            for ours, theirs in _in_layer(c, side, n):
                yield side, n, ours, f"model.{side}.layers.{n}.{theirs}"


def _in_layer(c: TransformerConfig, side: str, n: int) -> Iterator[tuple[str, str]]:
    """The arrays of a layer, by gshard's name and the layout's."""
    cross = "cross_attention" if c.experts else "encoder_attn"
    yield "self_norm", "self_attn_layer_norm"
    attentions = [("self_attention", "self_attn")]
    if side == "decoder":
        yield "cross_norm", f"{cross}_layer_norm"
        attentions.append(("cross_attention", cross))
    yield "feed_forward_norm", f"{'ff' if c.experts else 'final'}_layer_norm"
    for ours, theirs in attentions:
        for letter, name in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("o", "out_proj")):
            yield f"{ours}.{{}}{letter}", f"{theirs}.{name}"
    ours, theirs = "feed_forward", "ffn." if c.experts else ""
    if has_experts(c, side, n):
        yield ROUTER, "ffn.router.classifier.weight"
        ours, theirs = "moe.experts", "ffn.experts.expert_{}."
    for letter, name in (("i", "fc1"), ("o", "fc2")):
        yield f"{ours}.{{}}{letter}", f"{theirs}{name}"


def _product(place: str, array: np.ndarray, hidden: int) -> Iterator[tuple[str, np.ndarray]]:
    """A weight as one of two dims, and a bias; a feed-forward layer's hidden dim has one size."""
    if place.endswith("out_proj"):
        array = array.reshape(-1, array.shape[-1])
    matrix = array.reshape(len(array), -1)
    if place.endswith("fc1"):
        matrix = np.pad(matrix, ((0, 0), (0, hidden - matrix.shape[1])))
    elif place.endswith("fc2"):
        matrix = np.pad(matrix, ((0, hidden - len(matrix)), (0, 0)))
    yield f"{place}.weight", matrix.T
    yield f"{place}.bias", np.zeros(matrix.shape[1])


def _hidden_dims(c: TransformerConfig) -> dict[str, int]:
    """The largest hidden size of each stack's layers."""
    sparse = c.expert_hidden_dim or c.hidden_dim
    decoder = sparse
    if c.experts and c.experts_in == "encoder":
        decoder = c.gating.top_k * sparse + c.shared_hidden_dim
    return {"encoder": max(c.hidden_dim, sparse), "decoder": max(c.hidden_dim, decoder)}


def _config(c: TransformerConfig) -> dict[str, Any]:
    hidden = _hidden_dims(c)
    sparse = {
        "num_experts": c.experts,
        "decoder_sparse_step": 2 if c.experts_in == "both" else 0,
    }
    return {
        **LAYOUT["config"],
        **(LAYOUT["experts"] | sparse if c.experts else {}),
        "vocab_size": c.source_vocab + c.target_vocab,
        "d_model": c.model_dim,
        **{f"{side}_layers": getattr(c, f"{side}_layers") for side in hidden},
        **{f"{side}_attention_heads": c.heads for side in hidden},
        **{f"{side}_ffn_dim": size for side, size in hidden.items()},
        "max_position_embeddings": _POSITIONS,
        "bos_token_id": c.source_vocab + START,
        "eos_token_id": c.source_vocab + END,
        "decoder_start_token_id": c.source_vocab + START,
    }


def _generation(c: TransformerConfig) -> dict[str, Any]:
    first = c.source_vocab
    silent = [*range(first), *(first + token for token in (PAD, UNKNOWN, START))]
    return {
        "bos_token_id": first + START,
        "eos_token_id": first + END,
        "pad_token_id": first + PAD,
        "decoder_start_token_id": first + START,
        "suppress_tokens": silent,
        "num_beams": 1,
        "max_length": 256,
    }


def _write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Two SentencePiece models, and the ids of their pieces in the one table."""
    for side, model in zip(("source", "target"), tokenizer.models, strict=True):
        (folder / f"{side}.spm").write_bytes(model)
    size = tokenizer.source_size
    pieces = tokenizer.spell_source(range(size))
    ids = {_code(piece): n for n, piece in enumerate(pieces)}
    spoken = tokenizer.spell_target(range(tokenizer.target_size))
    target = {_SPECIAL.get(n, piece): size + n for n, piece in enumerate(spoken)}
    special = {piece: size + n for n, piece in _SPECIAL.items()}
    _write(folder / VOCABULARY, asdict(tokenizer.config))
    _write(folder / "vocab.json", ids | special)
    _write(folder / "target_vocab.json", target | {"<unk>": size + UNKNOWN, "<pad>": size + PAD})
    sizes = {"additional_special_tokens": [*special], "model_max_length": _POSITIONS}
    _write(folder / "tokenizer_config.json", LAYOUT["tokenizer"] | sizes)


def _code(piece: str) -> str:
    """A tag such as <2de> as MarianTokenizer writes it: >>de<<."""
    return f">>{piece[2:-1]}<<" if piece.startswith("<2") and piece.endswith(">") else piece


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def inexpressible(config: TransformerConfig) -> str:
    """Why a model has no form in other tools' layouts, or ""."""
    c = config
    if c.biases or c.first_position or c.experts_every != 2:
        return "it was imported (model.biases, model.first_position, model.experts_every)"
    if not c.heads * c.key_dim == c.heads * c.value_dim == c.model_dim:
        return (
            f"its heads have {c.key_dim} and {c.value_dim} numbers for keys and values, and the "
            f"layout has model_dim / heads = {c.model_dim} / {c.heads} for both"
        )
    if c.model_dim % 2:
        return f"its model_dim of {c.model_dim} is odd"
    if c.experts and c.gating.top_k != 2:
        return f"its tokens go to {c.gating.top_k} expert, and the layout's to 2"
    if c.experts and c.shared_hidden_dim:
        return "it has a feed-forward network beside its experts (model.shared_hidden_dim)"
    return ""


def specification(model: Transformer) -> Any:
    """The model in CTranslate2's terms."""
    from ctranslate2.specs import TransformerSpec  # of the extra `export`

    c = model.config
    spec = TransformerSpec.from_config((c.encoder_layers, c.decoder_layers), c.heads)
    spec.encoder.embeddings[0].weight = _floats(model.source.table)
    spec.decoder.embeddings.weight = _floats(model.target.table)
    spec.decoder.projection.weight = _floats(model.target.table)
    positions = sinusoids(jnp.arange(2 * _POSITIONS)[None], c.model_dim)[0]
    load: Load = named(model).__getitem__
    for side, stack in (("encoder", spec.encoder), ("decoder", spec.decoder)):
        stack.position_encodings.encodings = _floats(positions)
        _specify_norm(stack.layer_norm, f"{side}_norm", load)
        for n, into in enumerate(stack.layer):
            _specify_layer(into, in_layer(load, c, side, n), side)
    return spec


def _specify_layer(into: Any, load: Load, side: str) -> None:
    norms = {"self_norm": into.self_attention, "feed_forward_norm": into.ffn}
    attention, own = into.self_attention.linear, "self_attention"
    products = [(attention[0], own, "qkv"), (attention[1], own, "o")]
    products += [(into.ffn.linear_0, "feed_forward", "i"), (into.ffn.linear_1, "feed_forward", "o")]
    if side == "decoder":
        norms["cross_norm"] = into.attention
        linear, cross = into.attention.linear, "cross_attention"
        products += zip(linear, (cross, cross, cross), ("q", "kv", "o"), strict=True)
    for name, part in norms.items():
        _specify_norm(part.layer_norm, name, load)
    for linear, name, letters in products:
        arrays = [_floats(load(f"{name}.w{letter}")) for letter in letters]
        rows = -1 if letters == "o" else len(arrays[0])
        columns = arrays[0].shape[-1] if letters == "o" else -1
        _linear(linear, *(array.reshape(rows, columns) for array in arrays))


def _linear(into: Any, *weights: np.ndarray) -> None:
    """Weights [in, out], side by side; CTranslate2 has [out, in]."""
    into.weight = np.ascontiguousarray(np.concatenate(weights, axis=1).T)
    into.bias = np.zeros(len(into.weight), np.float32)


def _specify_norm(into: Any, name: str, load: Load) -> None:
    into.gamma, into.beta = _floats(load(f"{name}.scale")), _floats(load(f"{name}.bias"))


def _floats(array: Any) -> np.ndarray:
    return np.asarray(array, np.float32)
