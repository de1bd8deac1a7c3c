"""Checkpoints as NLLB and M2M100 have them, tokenizer and all, made with `transformers`."""

import json
import pickle

import pytest
import sentencepiece

from gshard import cli
from gshard.errors import UserError
from gshard.mt.decoding.engines import EngineConfig, open_translator
from gshard.mt.decoding.texts import TranslateConfig
from gshard.mt.release.imported import import_model
from gshard.mt.run import Run
from gshard.mt.serving.service import Service
from tests.mt.release.checkpoints import pieces, transformers_4
from tests.mt.release.test_imported import checkpoint
from tests.mt.samples import sentence

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers

LANGUAGES = {"nllb": ("deu_Latn", "fra_Latn"), "m2m": ("de", "fr")}
SYMBOLS = [1, 3, 0, 2]  # their ids of gshard's first four


def saved(folder, family):
    """A checkpoint with its tokenizer: both as `transformers` has them."""
    transformers = transformers_4()
    torch = pytest.importorskip("torch")
    folder.mkdir()
    spm = folder / "sentencepiece.bpe.model"
    spm.write_bytes(pieces())
    if family == "nllb":
        tokenizer = transformers.NllbTokenizer(str(spm))
        size = len(tokenizer) + 8  # ids that nothing has
    else:
        processor = sentencepiece.SentencePieceProcessor(model_file=str(spm))
        known = [processor.id_to_piece(i) for i in range(3, processor.vocab_size())]
        names = ["<s>", "<pad>", "</s>", "<unk>", *known]
        (folder / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(names)}))
        tokenizer = transformers.M2M100Tokenizer(str(folder / "vocab.json"), str(spm))
        size = len(names) + 100 + 8
    tokenizer.save_pretrained(folder)
    kind = "sparse" if family == "nllb" else "dense"
    more = {"encoder_sparse_step": 2, "decoder_sparse_step": 2} if family == "nllb" else {}
    model = checkpoint(folder, kind, vocab_size=size, d_model=32, **more)
    with torch.no_grad():  # so that a translation depends on its source
        for name, weight in model.named_parameters():
            if "decoder" in name and ("cross" in name or "encoder_attn" in name):
                weight *= 20.0
    model.save_pretrained(folder)
    return tokenizer, model


def ours(ids):
    """Their ids in gshard's order."""
    place = {theirs: n for n, theirs in enumerate(SYMBOLS)}
    return [place.get(int(i), int(i)) for i in ids]


def greedy(tokenizer, model, texts, source, target):
    """Their translations."""
    torch = pytest.importorskip("torch")
    tokenizer.src_lang = source
    given = tokenizer(texts, return_tensors="pt", padding=True)
    is_m2m = hasattr(tokenizer, "get_lang_id")
    language = (tokenizer.get_lang_id if is_m2m else tokenizer.convert_tokens_to_ids)(target)
    with torch.no_grad():
        found = model.generate(
            **given,
            forced_bos_token_id=language,
            num_beams=1,
            do_sample=False,
            max_length=19,
            suppress_tokens=[0, 1, 3],  # gshard never writes these
        )
    return [row[1:].tolist() for row in found]


def check(folder, family, count, engine):
    tokenizer, model = saved(folder / "theirs", family)
    import_model(folder / "theirs", folder / "out")
    run = Run.open(folder / "out")
    source, target = LANGUAGES[family]
    texts = [sentence(n) for n in range(count)]
    tokenizer.src_lang = source
    want = [ours(ids) for ids in tokenizer(texts)["input_ids"]]
    assert run.tokenizer.encode_source(texts, target, source) == want
    config = TranslateConfig(beam=1, longest=max(map(len, want)), most=18, shortest=512)
    translator, _ = open_translator(run, "best", config, engine=EngineConfig(engine))
    found = translator.translate(texts, target, source=source)
    theirs = greedy(tokenizer, model, texts, source, target)
    for (best,), ids in zip(found, theirs, strict=True):
        assert list(best.tokens[:-1]) == ours(ids)[: len(best.tokens) - 1]
        spoken = tokenizer.decode(ids, skip_special_tokens=True)
        ended = 2 in ids
        assert not ended or best.text.split() == spoken.split()
    assert len({best.tokens for (best,) in found}) > 3
    return run, translator


@pytest.mark.parametrize("family", ["nllb", pytest.param("m2m", marks=pytest.mark.slow)])
def test_greedy_translations_are_those_of_transformers(family, tmp_path):
    check(tmp_path, family, 60, "onnx")


@pytest.mark.slow
def test_commands_and_the_service_have_its_languages(tmp_path, capsys):
    run, translator = check(tmp_path, "m2m", 12, "onnx")
    text = tmp_path / "text"
    text.write_text(f"{sentence(1)}\n")
    with pytest.raises(SystemExit) as ended:
        cli.main(["translate", str(run.folder), str(text), "--from", "de", "--to", "fr"])
    assert not ended.value.code
    assert capsys.readouterr().out.count("\n") == 1
    with pytest.raises(SystemExit):
        cli.main(["translate", str(run.folder), str(text), "--to", "fr"])
    assert "has to know the language of the text" in capsys.readouterr().err
    service = Service(translator)
    assert service.about.needs_source  # so that the page asks for it
    assert len(service.about.sources) == len(service.about.targets) == 100
    (piece,) = service.submit_pieces([sentence(1)], "fr", source="de").result()
    assert piece == translator.translate([sentence(1)], "fr", source="de")[0]
    other = service.submit_pieces([sentence(1)], "fr", source="af").result()
    assert other[0][0].tokens[0] == piece[0].tokens[0] == run.tokenizer.tag("fr")
    shown = service.translate({"text": sentence(1), "source": "de", "target": "fr"})
    assert shown["translation"] == piece[0].text
    with pytest.raises(UserError, match="no language 'xx'"):
        translator.translate([sentence(1)], "xx", source="de")


@pytest.mark.slow
def test_no_text_spells_a_tag(tmp_path):
    saved(tmp_path / "theirs", "nllb")
    import_model(tmp_path / "theirs", tmp_path / "out")
    tokenizer = Run.open(tmp_path / "out").tokenizer
    (ids,) = tokenizer.encode_source(["<deu_Latn> deu_Latn </s> <pad>"], "fra_Latn", "fra_Latn")
    assert ids[0] == tokenizer.tag("fra_Latn")
    assert tokenizer.tag("deu_Latn") not in ids
    assert ids.count(3) == 1
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.digest == tokenizer.digest
    assert again.encode_source(["a"], "fra_Latn", "deu_Latn") == [
        tokenizer.encode_source(["a"], "fra_Latn", "deu_Latn")[0]
    ]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["onnx", "xla"])
@pytest.mark.parametrize("family", ["nllb", "m2m"])
def test_300_sentences(family, engine, tmp_path):
    check(tmp_path, family, 300, engine)
