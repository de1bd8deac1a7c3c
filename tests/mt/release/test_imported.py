"""Checkpoints of `transformers`, with random weights and biases, read as gshard models."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from gshard import cli
from gshard.errors import UserError
from gshard.mt.batching.tokenizer import PAD
from gshard.mt.decoding.engines import EngineConfig, open_translator
from gshard.mt.decoding.host.translator import HostModel, host_search
from gshard.mt.decoding.on_device import beam_search
from gshard.mt.decoding.search import BeamConfig
from gshard.mt.decoding.texts import TranslateConfig
from gshard.mt.release.exported import export
from gshard.mt.release.imported import (
    import_model,
    load_import,
    read_checkpoint,
)
from gshard.mt.release.imported_files import read_tokenizer
from gshard.mt.release.make import verify
from gshard.mt.run import Run
from gshard.mt.training.loading import load_model
from gshard.mt.training.weights import named
from gshard.nn import Batch
from tests.mt.release.checkpoints import transformers_4
from tests.mt.release.test_exported import KINDS, made

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers

SIZES = {
    "vocab_size": 40,
    "d_model": 16,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 32,
    "pad_token_id": 1,
}
SPARSE = {"num_experts": 4, "router_dtype": "float32", "moe_eval_capacity_token_fraction": 1.0}


def checkpoint(folder, kind, **changes):
    """A model of transformers with random weights; its biases and scales are random too."""
    transformers = transformers_4()
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    if kind == "dense":
        config = transformers.M2M100Config(**{**SIZES, **changes})
        model = transformers.M2M100ForConditionalGeneration(config)
    else:
        config = transformers.NllbMoeConfig(**{**SIZES, **SPARSE, **changes})
        model = transformers.NllbMoeForConditionalGeneration(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight += 0.3 * torch.randn_like(weight)
            else:
                weight *= 5.0
    model.save_pretrained(folder)
    return model.eval()


def pairs():
    rng = np.random.default_rng(0)
    return rng.integers(4, 40, (3, 7)), rng.integers(4, 40, (3, 6))


def check(theirs, ours):
    torch = pytest.importorskip("torch")
    source, inputs = pairs()
    with torch.no_grad():
        want = theirs(
            input_ids=torch.tensor(source), decoder_input_ids=torch.tensor(inputs), use_cache=False
        ).logits.numpy()
    batch = Batch.of(source, inputs, pad=-1)._replace(inputs=inputs)
    found, _ = jax.jit(lambda m, b: m(b, dropless=True))(ours, batch)
    np.testing.assert_allclose(found, want, atol=2e-4 * np.abs(want).max())
    assert np.abs(want).max() > 1


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("sparse", {"encoder_sparse_step": 4, "decoder_sparse_step": 4}),
        pytest.param("dense", {}, marks=pytest.mark.slow),
        pytest.param(
            "sparse",
            {"encoder_sparse_step": 2, "decoder_sparse_step": 2, "decoder_ffn_dim": 24},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "sparse", {"encoder_sparse_step": 2, "decoder_sparse_step": 0}, marks=pytest.mark.slow
        ),
    ],
)
def test_equal_logits(kind, changes, tmp_path):
    theirs = checkpoint(tmp_path / "theirs", kind, **changes)
    check(theirs, read_checkpoint(tmp_path / "theirs"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_both_searches_have_its_biases_and_positions(kind, tmp_path):
    checkpoint(tmp_path / "theirs", kind)
    model = import_model(tmp_path / "theirs", tmp_path / "ours")
    again = load_import(tmp_path / "ours")
    for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
    config = BeamConfig(beam=3, nbest=2, max_length=6)
    source = pairs()[0].astype(np.int32)
    source[1, 4:] = PAD
    want = jax.jit(lambda m, s: beam_search(m, s, config))(model, source)
    arrays = {name: np.asarray(leaf) for name, leaf in named(model).items()}
    found = host_search(HostModel(model.config, arrays.__getitem__), source, config)
    np.testing.assert_array_equal(found.tokens, want.tokens)
    np.testing.assert_allclose(found.scores, want.scores, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(kind, tokenizer, tmp_path):
    """What gshard wrote in Hugging Face's layout has the logits that it had."""
    run = made(tmp_path / "run", tokenizer, **KINDS[kind])
    ours, _ = load_model(run)
    back = read_checkpoint(export(run, tmp_path / "out"))
    assert back.config.source_vocab == ours.config.source_vocab
    rng = np.random.default_rng(0)
    source = rng.integers(4, ours.config.source_vocab, (3, 7))
    target = rng.integers(4, ours.config.target_vocab, (3, 6))
    batch = Batch.of(source, target, pad=-1)
    want, found = (model(batch, dropless=True)[0] for model in (ours, back))
    np.testing.assert_allclose(found, want, atol=1e-5 * np.abs(want).max())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_gshard_wrote_is_a_release_again(kind, tokenizer, tmp_path):
    """Vocabularies, directions and checksums included; its translations are the same."""
    run = made(tmp_path / "run", tokenizer, **KINDS[kind])
    import_model(export(run, tmp_path / "theirs"), tmp_path / "back")
    back = Run.open(tmp_path / "back")
    assert verify(back) > 0
    assert back.tokenizer.digest == tokenizer.digest
    assert back.tokenizer.tasks == tokenizer.tasks
    both = []
    for each in (run, back):
        config = TranslateConfig(beam=3, longest=16, most=12)
        translator, _ = open_translator(each, config=config, engine=EngineConfig("onnx"))
        both.append(translator.translate(["one two three", "four", "five six"], "de"))
    for ours, theirs in zip(*both, strict=True):
        assert ours[0].text == theirs[0].text
        assert ours[0].score == pytest.approx(theirs[0].score, rel=1e-4)


def test_a_damaged_vocabulary_is_named(tmp_path):
    path = tmp_path / "gshard_vocabulary.json"
    assert read_tokenizer(tmp_path, {}, (40, 40)) is None
    path.write_text('{"languages": ["de"], "directions": "to-english"}')
    with pytest.raises(UserError, match=r"source\.spm is missing"):
        read_tokenizer(tmp_path, {}, (40, 40))
    path.write_text('{"languages": ["de"], "size": 3}')
    with pytest.raises(UserError, match=r"gshard_vocabulary\.json: no setting 'size'"):
        read_tokenizer(tmp_path, {}, (40, 40))


REFUSED = {
    "activation_function": ("gelu", "activation 'gelu'"),
    "scale_embedding": (False, "not scaled"),
    "tie_word_embeddings": (False, "output projection of its own"),
    "decoder_attention_heads": (4, "2 and 4 heads"),
    "encoder_layers": (3, "3 and 4 layers"),
    "router_bias": (True, "router_bias"),
    "moe_eval_capacity_token_fraction": (0.5, "dropped"),
    "second_expert_policy": ("sampling", "by chance"),
    "encoder_sparse_step": (1, "every 1 encoder"),
    "decoder_sparse_step": (2, "every 4 encoder and 2 decoder"),
    "model_type": ("t5", "'t5', which is not m2m_100 or nllb-moe"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_form_is_named(name, tmp_path):
    value, message = REFUSED[name]
    settings = {"model_type": "nllb-moe", **SIZES, **SPARSE, name: value}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    save_file({"model.shared.weight": np.zeros((40, 16), "f")}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=message):
        read_checkpoint(tmp_path)


def test_no_checkpoint(tmp_path, capsys):
    for files, message in (((), "no config.json"), (("config.json",), "no model.safetensors")):
        for name in files:
            (tmp_path / name).write_text('{"model_type": "nllb-moe"}')
        with pytest.raises(SystemExit):
            cli.main(["import", str(tmp_path), "--out", str(tmp_path / "new")])
        assert message in capsys.readouterr().err
