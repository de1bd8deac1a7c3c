"""Releases in Hugging Face's layout, read and run by `transformers` itself."""

import dataclasses

import numpy as np
import pytest

from gshard.errors import UserError
from gshard.mt.batching.batches import BatchConfig
from gshard.mt.batching.tokenizer import END, START
from gshard.mt.config import RunConfig
from gshard.mt.decoding.texts import TranslateConfig
from gshard.mt.decoding.translator import Translator
from gshard.mt.release.exported import export
from gshard.mt.run import Run
from gshard.mt.training.checkpoint import Checkpoints
from gshard.mt.training.loading import load_model
from gshard.nn import Batch
from gshard.nn.config import GatingConfig
from tests.mt.release.checkpoints import transformers_4
from tests.mt.samples import sentence
from tests.nn import models

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers

DIMS = dataclasses.replace(models.TINY, heads=2, key_dim=8, value_dim=8, model_dim=16)
KINDS = {
    "dense": {"experts": 0, "expert_hidden_dim": 24},
    "sparse": {"experts": 8},
    "encoder": {"experts": 8, "experts_in": "encoder", "expert_hidden_dim": 40, "stacked": False},
}


def made(folder, tokenizer, **changes):
    """A run with random weights, some of which are no zeros and ones as at the start."""
    config = RunConfig(
        dataclasses.replace(DIMS, **changes),
        vocabulary=tokenizer.config,
        batch=BatchConfig(source_length=16, target_length=16),
    )
    run = Run.create(folder, config)
    tokenizer.save(folder / "vocabulary")
    checkpoints = Checkpoints(folder)
    model = models.model(run.model_config, 3)
    checkpoints.save(5, model, {"count": np.zeros(3)}, {}, dev_nll=3.0)
    checkpoints.close()
    return run


def opened(folder):
    transformers = transformers_4()
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder)


def logits_there(model, tokenizer, source, target):
    """transformers' logits of the target's part of the table."""
    torch = pytest.importorskip("torch")
    V = tokenizer.source_size
    start = np.full((len(target), 1), START)
    inputs = np.concatenate([start, target[:, :-1]], axis=1) + V
    with torch.no_grad():
        found = model(
            input_ids=torch.tensor(source), decoder_input_ids=torch.tensor(inputs), use_cache=False
        )
    return found.logits.numpy()[..., V:]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_logits_and_tokens(kind, tokenizer, tmp_path):
    run = made(tmp_path / "run", tokenizer, **KINDS[kind])
    ours, _ = load_model(run)
    theirs, reader = opened(export(run, tmp_path / "out"))
    texts = [sentence(n) for n in range(3)]
    source = tokenizer.encode_source(texts, "de")
    assert reader([f">>de<<{text}" for text in texts])["input_ids"] == source
    length = min(map(len, source))
    source = np.array([ids[:length] for ids in source])
    target = np.random.default_rng(0).integers(4, tokenizer.target_size, (3, 7))
    want, _ = ours(Batch.of(source, target, pad=-1, start=START), dropless=True)
    found = logits_there(theirs, tokenizer, source, target)
    np.testing.assert_allclose(found, want, atol=2e-4 * np.abs(want).max())


def greedy(run, folder, tokenizer, texts, target="de"):
    """Tokens of greedy search by gshard and by transformers."""
    settings = TranslateConfig(beam=1, rows=16, longest=24, most=10)
    model, _ = load_model(run)
    ours = Translator(model, tokenizer, config=settings).translate(texts, target)
    theirs, reader = opened(folder)
    batch = reader([f">>{target}<<{text}" for text in texts], return_tensors="pt", padding=True)
    found = theirs.generate(**batch, max_new_tokens=10, max_length=None).numpy()
    said = reader.batch_decode(found, skip_special_tokens=True)
    return [h[0] for h in ours], found[:, 1:] - tokenizer.source_size, said


def same(ours, tokens, said):
    """How many translations are the same; gshard's last token may be a forced end."""
    count = 0
    for hypothesis, row, text in zip(ours, tokens, said, strict=True):
        *mine, end = hypothesis.tokens
        assert end == END
        alike = mine == row[: len(mine)].tolist()
        ended = END in row[: len(mine) + 1].tolist()
        count += alike and (not ended or text == hypothesis.text.strip())
    return count


@pytest.mark.slow
def test_the_same_greedy_translations_of_a_few(tokenizer, tmp_path):
    run = made(tmp_path / "run", tokenizer, **KINDS["sparse"])
    folder = export(run, tmp_path / "out")
    assert same(*greedy(run, folder, tokenizer, [sentence(n) for n in range(6)])) == 6


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_greedy_translations_of_300(kind, tokenizer, tmp_path):
    run = made(tmp_path / "run", tokenizer, **KINDS[kind])
    folder = export(run, tmp_path / "out")
    texts = [sentence(7 * n) for n in range(300)]
    assert same(*greedy(run, folder, tokenizer, texts)) == 300


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key_dim": 4}, "4 and 8 numbers for keys and values"),
        ({"experts": 8, "gating": GatingConfig(top_k=1)}, "go to 1 expert"),
        ({"experts": 8, "shared_hidden_dim": 8}, "beside its experts"),
    ],
)
def test_what_the_layout_cannot_say_is_named(changes, message, tokenizer, tmp_path):
    run = made(tmp_path / "run", tokenizer, **changes)
    with pytest.raises(UserError, match=message):
        export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
