"""Releases for CTranslate2, run by it."""

import pytest

from gshard import cli
from gshard.errors import UserError
from gshard.mt.decoding.texts import TranslateConfig
from gshard.mt.decoding.translator import Translator
from gshard.mt.training.loading import load_model
from tests.mt.release.test_exported import KINDS, made
from tests.mt.samples import sentence

ctranslate2 = pytest.importorskip("ctranslate2")  # of the extra `export`


@pytest.mark.parametrize("stacked", [pytest.param(True, marks=pytest.mark.slow), False])
def test_the_same_tokens_and_scores(stacked, tokenizer, tmp_path):
    run = made(tmp_path / "run", tokenizer, **KINDS["dense"], stacked=stacked)
    with pytest.raises(SystemExit) as ended:
        cli.main(
            ["release", str(run.folder), "--out", str(tmp_path / "out"), "--to", "ctranslate2"]
        )
    assert ended.value.code in (0, None)
    texts = [sentence(n) for n in range(12)]
    model, _ = load_model(run)
    settings = TranslateConfig(beam=1, alpha=0.0, rows=16, longest=24, most=10)
    ours = Translator(model, tokenizer, config=settings).translate(texts, "de")
    theirs = ctranslate2.Translator(str(tmp_path / "out"), intra_threads=1)
    pieces = [["<2de>", *tokenizer._source.encode(text, out_type=str)] for text in texts]
    found = theirs.translate_batch(
        pieces, beam_size=1, max_decoding_length=9, suppress_sequences=[["<pad>"], ["<s>"]],
        disable_unk=True, return_scores=True,
    )  # fmt: skip
    for (mine, *_), theirs_one in zip(ours, found, strict=True):
        assert tokenizer.spell_target(mine.tokens[:-1]) == theirs_one.hypotheses[0]


def test_experts_have_no_form_there(tokenizer, tmp_path):
    from gshard.mt.release.exported import to_ctranslate2 as export

    run = made(tmp_path / "run", tokenizer, **KINDS["sparse"])
    with pytest.raises(UserError, match="has experts"):
        export(run, tmp_path / "out")
