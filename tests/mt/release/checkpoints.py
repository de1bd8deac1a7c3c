"""Small checkpoints as `transformers` writes them, tokenizers included, made without it."""

import functools
import io
import json

import numpy as np
import pytest
import sentencepiece
from safetensors.numpy import save_file

from gshard.mt.release.imported_files import _CODES
from tests.mt.samples import sentence

M, HEADS, EXPERTS = 16, 2, 4
SETTINGS = {
    "d_model": M,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 32,
    "activation_function": "relu",
    "scale_embedding": True,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
MIXED = {
    "num_experts": EXPERTS,
    "encoder_sparse_step": 2,
    "decoder_sparse_step": 2,
    "moe_token_dropout": 0.2,
    "moe_eval_capacity_token_fraction": 1.0,
}


@functools.cache
def pieces():
    """A SentencePiece model with fairseq's symbols."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([sentence(n) for n in range(300)]),
        model_writer=model,
        vocab_size=120,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return model.getvalue()


def files(kind):
    """Settings, tensors and the tokenizer's JSON of a "dense" or "sparse" checkpoint."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=pieces())
    known = [processor.id_to_piece(i) for i in range(3, processor.vocab_size())]
    if kind == "dense":
        names = ["<s>", "<pad>", "</s>", "<unk>", *known]
        size = len(names) + len(_CODES["m2m100"].split()) + 8
        words = {"vocab.json": {name: i for i, name in enumerate(names)}}
        # As transformers writes it: a length without a limit is int(1e30).
        unlimited = {"model_max_length": int(1e30)}
        words["tokenizer_config.json"] = {"language_codes": "m2m100", **unlimited}
        given = {"model_type": "m2m_100", **SETTINGS}
    else:
        size = len(known) + 4 + 2 + 8
        words = {
            "tokenizer_config.json": {"legacy_behaviour": False, "model_max_length": int(1e30)},
            "special_tokens_map.json": {"additional_special_tokens": ["deu_Latn", "fra_Latn"]},
        }
        given = {"model_type": "nllb-moe", **SETTINGS, **MIXED}
    given["vocab_size"] = size
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(size=shape).astype("f") for name, shape in shapes(kind, size)}
    return given, arrays, words


def shapes(kind, size):
    """The tensors of a checkpoint by name."""
    cross, last, inside = ("cross_attention", "ff", "ffn.")
    if kind == "dense":
        cross, last, inside = ("encoder_attn", "final", "")
    yield "model.shared.weight", (size, M)
    for side, hidden in (("encoder", 24), ("decoder", 32)):
        norms = [f"model.{side}.layer_norm"]
        for n in range(2):
            place = f"model.{side}.layers.{n}"
            attentions = ["self_attn", *([cross] if side == "decoder" else [])]
            norms += [f"{place}.{name}_layer_norm" for name in (*attentions, last)]
            for name in attentions:
                for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
                    yield f"{place}.{name}.{part}.weight", (M, M)
                    yield f"{place}.{name}.{part}.bias", (M,)
            networks = [f"{place}.{inside}"]
            if kind == "sparse" and n == 1:
                yield f"{place}.ffn.router.classifier.weight", (EXPERTS, M)
                networks = [f"{place}.ffn.experts.expert_{e}." for e in range(EXPERTS)]
            for network in networks:
                yield f"{network}fc1.weight", (hidden, M)
                yield f"{network}fc1.bias", (hidden,)
                yield f"{network}fc2.weight", (M, hidden)
                yield f"{network}fc2.bias", (M,)
        for norm in norms:
            yield f"{norm}.weight", (M,)
            yield f"{norm}.bias", (M,)


def write(folder, given, arrays, words):
    """A folder with a checkpoint."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(given))
    save_file(arrays, folder / "model.safetensors")
    (folder / "sentencepiece.bpe.model").write_bytes(pieces())
    for name, content in words.items():
        (folder / name).write_text(json.dumps(content))


def transformers_4():
    """`transformers`; a test without it, or with a later one, is skipped."""
    found = pytest.importorskip("transformers")  # of the extra `export`
    if int(found.__version__.split(".")[0]) > 4:
        pytest.skip("transformers 5 sends the tokens of NllbMoe to experts 0 and 1 alone")
    return found
