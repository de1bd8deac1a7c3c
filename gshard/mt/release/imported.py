"""A checkpoint of Hugging Face as a gshard model: `NllbMoe`, or `M2M100`, from a local folder.

The model computes what `transformers` computes: biases, positions that begin after the padding's
number and experts in every fourth layer are settings of `TransformerConfig`. Layer normalization
has an epsilon of 1e-6 here and of 1e-5 there; logits differ in the sixth digit. Nothing is
dropped, as there with a capacity of all tokens. What has no form here is refused by name.

Both have one table for source and target. The layout that `gshard release --to huggingface` writes
has two vocabularies in it, which are taken apart again with their tokenizers. Original checkpoints
have one, with a tag for each language (`SharedTokenizer`): the table's first four rows, which are
symbols, are put into gshard's order, and everything else keeps its id. With its tokenizer, an
import is a release, which `gshard translate` and `gshard serve` take. Without, it is weights and
settings for Python (`load_import`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from gshard.errors import UserError
from gshard.mt import atomic
from gshard.mt.batching.tokenizer import START, SharedTokenizer, VocabularyConfig
from gshard.mt.config import RunConfig, to_json
from gshard.mt.release.exported import ROUTER, arrays_of
from gshard.mt.release.imported_files import (
    Tensors,
    TheirSettings,
    read_json,
    read_settings,
    read_tokenizer,
    symbols,
)
from gshard.mt.run import CONFIG
from gshard.mt.training import weights as files
from gshard.mt.typed import built
from gshard.nn.config import GatingConfig, TransformerConfig
from gshard.nn.transformer import Transformer

MODEL = "model.json"  # the settings of an imported model
_HIDDEN = {"wi": -1, "bi": -1, "wo": -2}  # which dim of an array is the hidden one


def read_checkpoint(folder: Path) -> Transformer:
    """The model in a folder of Hugging Face's, in float32."""
    given = read_settings(folder)
    tensors = Tensors(folder)
    config = model_config(folder, given, tensors.rows())
    found = dict(_renamed(given, tensors, config))  # before a model of any size is built
    tensors.refuse_unread()
    like = eqx.filter_eval_shape(Transformer, config, jax.random.key(0))
    arrays = {
        name: jnp.asarray(_padded(name, found[name], leaf.shape))
        for name, leaf in files.named(like).items()
    }
    return files.unnamed(arrays, like)


def import_model(folder: Path, out: Path) -> Transformer:
    """Write a checkpoint as weights and settings to the new folder `out`."""
    if out.exists():
        raise UserError(f"{out} exists already; an import goes to a new folder")
    model = read_checkpoint(folder)
    sizes = (model.config.source_vocab, model.config.target_vocab)
    given = read_settings(folder)
    tokenizer = read_tokenizer(folder, given, sizes)
    if isinstance(tokenizer, SharedTokenizer):
        order = np.concatenate([symbols(folder, given), np.arange(4, model.config.target_vocab)])
        tables = (model.source.table[order], model.target.table[order])
        model = eqx.tree_at(lambda m: (m.source.table, m.target.table), model, tables)
    name = atomic.printable(folder.name)
    try:
        vocabulary = tokenizer.config if tokenizer else VocabularyConfig()
        run = RunConfig(model.config, name=name, vocabulary=vocabulary)
    except ValueError as error:  # a number that no array can have, say
        raise UserError(f"{folder} has no form in gshard: {error}") from None
    with atomic.new_folder(out) as part:
        arrays = {place: np.asarray(leaf) for place, leaf in files.named(model).items()}
        files.write_weights(part / files.WEIGHTS, arrays, {"step": "0", "run": name})
        atomic.write_json(part / MODEL, dataclasses.asdict(model.config))
        if tokenizer is not None:
            atomic.write_json(part / CONFIG, to_json(run))
            tokenizer.save(part / files.VOCABULARY)
            files.write_checksums(part, files.verified_in(part))
    return model


def load_import(folder: Path) -> Transformer:
    """What `import_model` wrote."""
    config = built(TransformerConfig, read_json(folder / MODEL))
    weights = files.WeightsFile(folder / files.WEIGHTS)
    like = eqx.filter_eval_shape(Transformer, config, jax.random.key(0))
    return files.unnamed({name: jnp.asarray(weights[name]) for name in files.named(like)}, like)


def model_config(folder: Path, given: TheirSettings, rows: int) -> TransformerConfig:
    """The settings in gshard's terms; the table has so many rows."""
    if reason := _inexpressible(given):
        raise UserError(f"{folder} has no form in gshard: {reason}")
    experts = given.num_experts if given.model_type == "nllb-moe" else 0
    hidden = max(given.encoder_ffn_dim, given.decoder_ffn_dim)
    inside = "both" if not experts or given.decoder_sparse_step else "encoder"
    expert_hidden = hidden
    if inside == "encoder":  # the decoder's layers in their place have the size of two experts
        expert_hidden = max(given.encoder_ffn_dim, -(-given.decoder_ffn_dim // 2))
    # Where the target's part of the table begins in gshard's own layout.
    own = all((folder / f"{side}.spm").is_file() for side in ("source", "target"))
    first = given.bos_token_id - START if own else 0
    if rows != given.vocab_size or rows - first < 4 or (first and first < 4):
        raise UserError(
            f"{folder}: the table has {rows} rows, and by config.json {given.vocab_size}, with "
            f"those of the target from {first}"
        )
    head_dim = given.d_model // given.encoder_attention_heads
    return TransformerConfig(
        source_vocab=first or rows,
        target_vocab=rows - first,
        encoder_layers=given.encoder_layers,
        decoder_layers=given.decoder_layers,
        model_dim=given.d_model,
        hidden_dim=hidden,
        heads=given.encoder_attention_heads,
        key_dim=head_dim,
        value_dim=head_dim,
        experts=experts,
        experts_in="both" if inside == "both" else "encoder",
        expert_hidden_dim=expert_hidden,
        gating=GatingConfig(second_expert="all"),
        biases=True,
        first_position=given.pad_token_id + 1,
        experts_every=given.encoder_sparse_step if experts else 2,
        stacked=False,
    )


def _inexpressible(given: TheirSettings) -> str:
    """Why a checkpoint has no form in gshard, or ""."""
    sparse = given.model_type == "nllb-moe"
    steps = (given.encoder_sparse_step, given.decoder_sparse_step)
    heads = (given.encoder_attention_heads, given.decoder_attention_heads)
    layers = (given.encoder_layers, given.decoder_layers)
    wrong: dict[str, bool] = {
        f"activation {given.activation_function!r}": given.activation_function != "relu",
        "embeddings that are not scaled (scale_embedding)": not given.scale_embedding,
        "an output projection of its own": not given.tie_word_embeddings,
        f"{heads[0]} and {heads[1]} heads": heads[0] != heads[1],
        f"{layers[0]} and {layers[1]} layers, which are not even": any(n % 2 for n in layers),
        f"an odd d_model of {given.d_model}": given.d_model % 2 > 0,
        f"a d_model of {given.d_model}, not a multiple of the heads": given.d_model % heads[0] > 0,
    }
    if sparse:
        wrong |= {
            "a router with a bias (router_bias)": given.router_bias,
            "tokens that are dropped (moe_eval_capacity_token_fraction below 1)": (
                not given.moe_eval_capacity_token_fraction >= 1
            ),
            f"a second expert by chance ({given.second_expert_policy!r})": (
                given.second_expert_policy != "all"
            ),
            f"experts in every {steps[0]} encoder and {steps[1]} decoder layers": (
                not steps[0] or steps[0] % 2 > 0 or steps[1] not in (0, steps[0])
            ),
        }
    return next((reason for reason, holds in wrong.items() if holds), "")


def _renamed(
    given: TheirSettings, tensors: Tensors, c: TransformerConfig
) -> Iterator[tuple[str, np.ndarray]]:
    """The weights by gshard's names, in its order of dims."""
    table = tensors.table(given.vocab_size, c.model_dim)
    yield "source.table", table[: c.source_vocab]
    yield "target.table", table[-c.target_vocab :]
    for side, n, ours, theirs in arrays_of(c):
        into = "" if n is None else f"{side}.{n // 2}.{'sparse' if n % 2 else 'dense'}."
        if ours.endswith("_norm"):
            yield f"{into}{ours}.scale", tensors(f"{theirs}.weight", c.model_dim)
            yield f"{into}{ours}.bias", tensors(f"{theirs}.bias", c.model_dim)
        elif ours == ROUTER:
            yield f"{into}{ours}", tensors(theirs, c.experts, c.model_dim).T
        else:
            hidden = getattr(given, f"{side}_ffn_dim")
            shapes = {"fc1": (hidden, c.model_dim), "fc2": (c.model_dim, hidden)}
            shape = shapes.get(theirs[-3:], (c.model_dim, c.model_dim))
            # Training masks experts' results; afterwards each is made smaller by that share.
            by = 1 - given.moe_token_dropout if ours.endswith("o") else 1
            for letter, kind, dims in (("w", "weight", shape), ("b", "bias", shape[:1])):
                name, place = f"{into}{ours.format(letter)}", f"{theirs}.{kind}"
                if "{}" not in place:
                    yield name, tensors(place, *dims).T
                else:  # of each expert
                    each = [tensors(place.format(e), *dims).T for e in range(c.experts)]
                    yield name, np.stack(each) * np.float32(by)


def _padded(name: str, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """An array of this shape, with zeros behind its hidden dim, for values that are always zero."""
    if array.size == math.prod(shape):
        return array.reshape(shape)
    more = [(0, 0)] * len(shape)
    axis = _HIDDEN[name.rpartition(".")[2]]
    more[axis] = (0, shape[axis] - array.shape[axis])
    return np.pad(array, more)
