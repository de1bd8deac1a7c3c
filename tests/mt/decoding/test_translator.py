"""The translator beside beam search on one sentence at a time, and the command with bad input."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from gshard import cli
from gshard.errors import UserError
from gshard.mt.batching.tokenizer import VocabularyConfig
from gshard.mt.decoding.on_device import beam_search
from gshard.mt.decoding.texts import Hypothesis, TranslateConfig, choose_target, well_formed
from gshard.mt.decoding.translator import Translator
from gshard.nn import Strategy
from tests.mt.runs import Notes, make_run, random_model
from tests.mt.samples import WORDS

SMALL = TranslateConfig(beam=3, nbest=2, rows=3, longest=24, most=12)


@pytest.fixture(scope="module")
def model(tokenizer):
    return random_model(tokenizer)


@pytest.fixture(scope="module")
def translator(model, tokenizer):
    return Translator(model, tokenizer, config=SMALL)


def sentences(tokenizer, count, longest, seed=0):
    """Random words, with every number of tokens from few to `longest`."""
    rng = np.random.default_rng(seed)
    found = []
    while len(found) < count:
        text = " ".join(rng.choice(WORDS, rng.integers(1, 16)))
        if len(tokenizer.encode_source([text], "de")[0]) <= longest:
            found.append(text)
    return found


def one_by_one(model, tokenizer, texts, target, config, padded):
    """Beam search of one row at a time, in a shape that no batch has."""
    runs = {}
    for text in texts:
        (ids,) = tokenizer.encode_source([text], target)
        length = config.shape(len(ids))
        if length not in runs:
            search = config.search(length)
            runs[length] = jax.jit(lambda m, s, search=search: beam_search(m, s, search))
        source = np.zeros((1, padded), np.int32)
        source[0, : len(ids)] = ids
        found = runs[length](model, source)
        said = [np.asarray(found.tokens[0, n]).tolist() for n in range(config.nbest)]
        texts = tokenizer.decode_target(said)
        yield list(zip(texts, np.asarray(found.scores[0]).tolist(), strict=True))


@pytest.mark.parametrize(("devices", "rows"), [(1, 3), (8, 5)])
@pytest.mark.slow
def test_equal_to_beam_search_of_one_sentence(model, tokenizer, devices, rows):
    config = TranslateConfig(beam=3, nbest=2, rows=rows, longest=24, most=12)
    texts = sentences(tokenizer, 23, config.longest)
    lengths = [len(ids) for ids in tokenizer.encode_source(texts, "de")]
    assert {config.shape(n) for n in lengths} == {16, 24}
    translator = Translator(model, tokenizer, Strategy(devices), config)
    progress = Notes()
    found = translator.translate(texts, "de", progress)
    want = one_by_one(model, tokenizer, texts, "de", config, padded=31)
    for hypotheses, alone in zip(found, want, strict=True):
        assert [h.text for h in hypotheses] == [text for text, _ in alone]
        np.testing.assert_allclose(
            [h.score for h in hypotheses], [score for _, score in alone], rtol=1e-4
        )
        assert hypotheses[0].score >= hypotheses[1].score
    assert progress.stages == [("translate", 23)]
    assert progress.done["translate"] == 23
    # Two lengths of one batch size; a single sentence needs nothing new.
    assert len(translator._programs) == 2
    again = translator.translate(texts[5:6], "de")[0]
    assert [h.text for h in again] == [h.text for h in found[5]]
    assert len(translator._programs) == 2
    placed = [program.args[0] for program in translator._with_weights.values()]
    one, two = (jax.tree.leaves(tree) for tree in placed)
    assert all(a is b for a, b in zip(one, two, strict=True))  # the weights are there once


@pytest.mark.slow
def test_order_repetition_and_blank_lines(translator, tokenizer):
    texts = sentences(tokenizer, 6, 16, seed=1)
    texts = [*texts, "", texts[2], "   ", "\t", "\ufeff", "\u200f\u200e", "\u2028", *texts[::-1]]
    found = translator.translate(texts, "de")
    by_text = {}
    for text, hypotheses in zip(texts, found, strict=True):
        assert by_text.setdefault(text, hypotheses) == hypotheses
    assert len({hypotheses[0].text for hypotheses in found}) > 3
    for blank in texts[-13:-6]:
        expected = by_text[texts[2]] if blank == texts[2] else [Hypothesis("", 0.0)]
        assert by_text[blank] == expected
    assert translator.translate([]) == []


@pytest.mark.slow
def test_greedy_and_target_language(model, tokenizer, translator):
    texts = sentences(tokenizer, 2, 16)
    greedy = TranslateConfig(beam=1, rows=3, longest=16, most=8)
    (best,), _ = Translator(model, tokenizer, config=greedy).translate(texts, "de")
    ((text, score),), _ = one_by_one(model, tokenizer, texts, "de", greedy, 16)
    assert (best.text, best.score) == (text, pytest.approx(score, rel=1e-4))
    assert best.tokens[-1] == 3
    assert tokenizer.decode_target([best.tokens]) == [best.text]
    assert translator.translate(texts, "de") != translator.translate(texts, "ru")


@pytest.mark.slow
def test_odd_unicode(translator):
    odd = [
        "a\0b", "\0", "\ud800 half", "\ud83d\ude00 pair", "e\u0301 u\u0308 NFD", "\x1b[31mred",
        "👩‍👩‍👧‍👦 🇩🇪", "\u202eright to left\u202c", "ﷺ", "Ω" * 30, "\r\n", "\x85\x0b\x0c",
        "\uffff\ufdd0",
    ]  # fmt: skip
    for text, hypotheses in zip(odd, translator.translate(odd, "de"), strict=True):
        assert hypotheses, text
        json.dumps([h.text for h in hypotheses]).encode()
        for h in hypotheses:
            h.text.encode()
    assert well_formed("\ud83d\ude00\ud83d") == "😀\ufffd"


@pytest.mark.slow
def test_long_text_is_the_translation_of_its_pieces(translator, tokenizer):
    text = "The river saw the bridge today. " * 8 + "x" * 200
    pieces = translator.pieces(text)
    assert "".join(pieces) == text
    assert max(len(ids) for ids in tokenizer.encode_source(pieces, "de")) <= SMALL.longest
    ((first, second),) = translator.translate([text], "de")
    apart = translator.translate(pieces, "de")
    assert first.text == " ".join(h[0].text.strip() for h in apart if h[0].text.strip())
    assert second.text == " ".join(h[1].text.strip() for h in apart if h[1].text.strip())
    assert first.score == pytest.approx(np.mean([h[0].score for h in apart]))


def test_impossible_settings():
    for settings, message in [
        ({"beam": 0}, "beam of 0"),
        ({"beam": 2, "nbest": 3}, "3 best"),
        ({"alpha": float("nan")}, "alpha"),
        ({"alpha": 1e308}, r"alpha is 1e\+308; it must be from 0 to 10"),
        ({"beam": 10**20}, "the most"),
        ({"rows": 10**20}, "the most"),
        ({"rows": 0}, "0 rows"),
        ({"longest": 2}, "longest is 2"),
    ]:
        with pytest.raises(UserError, match=message):
            TranslateConfig(**settings)
    assert TranslateConfig(longest=100).lengths == (16, 32, 64, 100)
    assert TranslateConfig(longest=12).lengths == (12,)
    assert TranslateConfig().search(64).max_length == 144
    assert TranslateConfig().search(128).max_length == 256


# Languages.
def test_target_languages(tokenizer):
    assert choose_target(tokenizer) == "en"
    assert choose_target(tokenizer, "de") == "en"
    assert choose_target(tokenizer, "en", "fr") == "fr"
    for source, target, message in [
        ("en", "", "one of de, en, fr, ru"),
        ("ger", "", "not translate from 'ger'.*from de"),
        ("", "ruu", "did you mean 'ru'"),
        ("de", "de", "is in 'de'"),
    ]:
        with pytest.raises(UserError, match=message):
            choose_target(tokenizer, source, target)

    for directions, target in (("to-english", "en"), ("from-english", "de")):
        only = type(tokenizer)(
            *tokenizer.models, VocabularyConfig(directions=directions, languages=("de",))
        )
        assert choose_target(only) == target
        with pytest.raises(UserError, match=f"translates into {target}"):
            choose_target(only, "", "ru")


# The command.
@pytest.fixture(scope="module")
def run(tokenizer, tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "random", tokenizer)


def command(capfdbinary, *arguments):
    with pytest.raises(SystemExit) as exited:
        cli.main(["translate", *map(str, arguments)])
    out, err = capfdbinary.readouterr()
    return exited.value.code or 0, out.decode(), err.decode()


@pytest.mark.slow
def test_the_command(run, tmp_path, capfdbinary):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffder fluss\r\n\nsaw the river\n".encode())
    options = (run.folder, path, "--to", "de", "--beam", "2", "--rows", "4", "--devices", "1")
    code, plain, _ = command(capfdbinary, *options)
    assert code == 0
    assert plain.count("\n") == 3
    assert plain.splitlines()[1] == ""
    code, out, _ = command(capfdbinary, *options, "--json", "--nbest", "2")
    said = [json.loads(line) for line in out.splitlines()]
    assert [row["source"] for row in said] == ["der fluss", "", "saw the river"]
    for row, line in zip(said, plain.split("\n"), strict=False):
        assert re.sub(r"[\x00-\x1f\x7f-\x9f]", " ", row["translation"]) == line
        assert row["nbest"][0] == {"text": row["translation"], "score": row["score"]}
    code, out, _ = command(capfdbinary, *options, "--nbest", "2", "--checkpoint", "5")
    rows = [line.split("\t") for line in out.removesuffix("\n").split("\n")]
    assert [row[0] for row in rows] == ["1", "1", "2", "3", "3"]
    assert float(rows[0][1]) == pytest.approx(said[0]["score"], abs=1e-4)  # 5 is the best
    assert command(capfdbinary, *options, "--checkpoint", "last")[1] != plain


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}", "{folder}/absent.txt"], "no file"),
        (["{run}", "{folder}"], "is a folder"),
        (["{run}", "{folder}/empty.txt"], "is empty"),
        (["{run}", "{folder}/latin.txt"], "line 2, byte 5"),
        (["{run}", "{folder}/good.txt", "--encoding", "utf-9"], "no encoding 'utf-9'"),
        (["{run}", "{folder}/good.txt", "--encoding", "base64"], "no encoding 'base64'"),
        (["{run}", "{folder}/good.txt", "--from", "dee"], "did you mean 'de'"),
        (["{run}", "{folder}/good.txt", "--to", "xx"], "translates into de, en, fr, ru"),
        (["{run}", "{folder}/good.txt", "--beam", "70000"], "a beam of 70,000"),
        (["{run}", "{folder}/good.txt", "--checkpoint", "7"], "no checkpoint '7'"),
        (["{folder}", "{folder}/good.txt"], "no run in"),
        (["{broken}", "{folder}/good.txt", "--checkpoint", "5"], "damaged"),
    ],
)
def test_bad_input_is_said_plainly(run, tmp_path, capfdbinary, arguments, message):
    (tmp_path / "good.txt").write_text("fluss\n")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes("gut\nüber\n".encode("latin-1")[:4] + b"g\xfcber\n")
    if "{broken}" in arguments:
        shutil.copytree(run.folder, tmp_path / "broken")
        for path in (tmp_path / "broken" / "checkpoints" / "5" / "model").rglob("*"):
            if path.is_file() and path.stat().st_size > 200:
                os.truncate(path, path.stat().st_size // 2)
    places = {"run": run.folder, "folder": tmp_path, "broken": tmp_path / "broken"}
    given = [text.format(**places) for text in arguments]
    code, out, err = command(capfdbinary, *given)
    assert code == 1
    assert out == ""
    assert message in err
    assert "Traceback" not in err


def start_process(run, *options):
    return subprocess.Popen(
        [sys.executable, "-m", "gshard.cli", "translate", run.folder, "--to=de", *options],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.slow
def test_a_pipe_is_answered_line_by_line_and_ctrl_c_ends(run):
    with start_process(run, "--devices=1", "--beam=1") as process:
        for text in (b"fluss\n", b"\n", b"the river\n"):
            process.stdin.write(text)
            process.stdin.flush()
            line = process.stdout.readline()
            assert line.endswith(b"\n")
            assert bool(line.strip()) == bool(text.strip())
        process.send_signal(signal.SIGINT)
        assert process.wait(600) == 130
        err = process.stderr.read().decode()
    assert re.search("interrupted; [23] lines are translated", err)  # the third may just be out
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_closed_pipe_ends_it_quietly(run):
    with start_process(run, "--devices=1", "--beam=1") as process:
        process.stdin.write(b"fluss\n")
        process.stdin.flush()
        assert process.stdout.readline()
        process.stdout.close()
        process.stdin.write(b"fluss\n" * 5000)
        process.stdin.close()
        process.stdin = None
        assert process.wait(60) == 0
        assert process.stderr.read() == b""
