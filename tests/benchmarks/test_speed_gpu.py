"""The GPU's benchmark cases, tiny and on a CPU: that each runs, and what is read off them."""

import json

import numpy as np
import pytest

from benchmarks import speed_gpu
from benchmarks.gpu import text
from benchmarks.gpu.report import report, smooth
from gshard.mt.batching.tokens import open_task
from tests.documents import ROOT

TINY = {
    "model_dim": 16,
    "hidden_dim": 16,
    "heads": 2,
    "key_dim": 8,
    "value_dim": 8,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "source_vocab": 50,
    "target_vocab": 40,
}
SMALL = {"experts": 2, "tokens": 2048, "lengths": (32, 16), "dims": TINY, "weights": "float32"}


@pytest.fixture
def sample(tmp_path):
    """Two directions of translation as a run leaves them, packed into a sample."""
    rng = np.random.default_rng(0)
    for task in ("de-en", "fr-en"):
        place = tmp_path / "tokens" / task
        place.mkdir(parents=True)
        for side, largest in (("source", 50), ("target", 40)):
            lengths = rng.integers(3, 12, 300)
            np.save(place / f"{side}_ends.npy", np.cumsum([0, *lengths]))
            np.save(place / f"{side}.npy", rng.integers(4, largest, lengths.sum(), np.uint16))
        np.save(place / "words.npy", np.full(300, 5, np.uint8))
    path = tmp_path / "sample.npz"
    text.pack_sample(tmp_path / "tokens", path, 200)
    return path


def test_a_sample_holds_whole_sentences(sample, tmp_path):
    for tokens in text.unpack(sample, tmp_path):
        assert len(tokens) == 200
        everything = open_task(tmp_path / "tokens" / str(tokens.task), tokens.task)
        sentences = {everything.source[i].tobytes() for i in range(300)}
        assert all(tokens.source[i].tobytes() in sentences for i in range(200))


def test_a_sample_in_reverse(sample, tmp_path):
    there = text.unpack(sample, tmp_path / "there")
    back = text.unpack(sample, tmp_path / "back", reverse=True)
    assert [str(tokens.task) for tokens in back] == ["en-de", "en-fr"]
    for one, other in zip(there, back, strict=True):
        np.testing.assert_array_equal(one.source.ids, other.target.ids)
        np.testing.assert_array_equal(one.target.ends, other.source.ends)


def test_the_ratio_to_hugging_face_is_one_in_all_pages():
    """That of a run which measured both, from the rows of the page of speed."""
    page = (ROOT / "docs" / "results" / "speed.md").read_text()
    ratios = {}
    for sentences in ("64", "256"):
        gshard, peer = (
            next(cells[3] for line in page.splitlines()
                 if len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 6
                 and (cells[0], cells[1], cells[2], cells[-1]) == (engine, "32", sentences, "6"))
            for engine in ("gshard", "HF `generate`")
        )  # fmt: skip
        ratios[sentences] = f"{float(peer) / float(gshard):.1f}"
    assert f"| decoding: 5 times HF `generate`, 64 sentences | {ratios['64']} times" in page
    assert f"| decoding: the same, 256 sentences | {ratios['256']} times" in page
    readme = (ROOT / "README.md").read_text()
    assert f"{ratios['256']} times as fast as Hugging Face's with 256 sentences" in readme
    assert f"{ratios['64']} times with 64" in readme
    paper = (ROOT / "docs" / "results" / "paper.md").read_text()
    said = f"{ratios['256']} times the speed of Hugging Face at 256 sentences, {ratios['64']} at 64"
    assert said in paper


def test_tables_and_means():
    assert smooth([1.0, 3.0, 5.0, 7.0, 100.0], 2) == [2.0, 6.0]
    losses = {"nll": [4.0] * 6 + [2.0] * 6, "seconds": 3.0}
    found = [
        {"module": "curve", "steps": 12, "curves": {"float32": losses}},
        {"module": "compiling", "name": "again", "trace_s": 1.0, "lower_s": 0.5}
        | {"compile_s": 0.25, "ready_s": 1.75},
        {"module": "text", "name": "real text", "experts": 2, "tokens": 64, "error": "a\nlast"},
    ]
    told = report(found)
    assert "| float32 | 4.000 | 4.000 | 4.000 | 2.000 | 2.000 | 2.000 | 3 |" in told
    assert "| again | 1.0 | 0.5 | 0.2 | 1.8 |" in told
    assert "| gshard, real text | 2 | 64 | last |" in told


def test_report_compares_eight_bits():
    found = [
        {"module": "train", "name": name, "experts": 2, "tokens": 64, "tflop": 1.0, "ms": 1.0}
        | {"source_tokens_per_s": speed, "target_tokens_per_s": speed, "share": 0.5}
        | {"share_without_padding": 0.5, "peak_gb": 1.0, "compile_s": 1.0}
        for name, speed in (("bfloat16", 100.0), ("float8", 150.0))
    ]
    assert "float8: 1.50 times the tokens/s of bfloat16" in report(found)
    seeds = {"nll": [4.0] * 6, "ends": [4.0, 4.25], "seconds": 3.0}
    told = report([{"module": "curve", "steps": 6, "curves": {"float8": seeds}}])
    assert "| float8 | 4.000 | 4.000 | 4.000 | 4.000 | 4.000 | 4.000 | 3 | 4.000, 4.250 |" in told


@pytest.mark.slow
def test_cases_run(sample, tmp_path, capsys):
    """Each in a process of its own, as on the GPU; the second process finds the program."""
    compiling = {"module": "compiling", **SMALL, "length": 32}
    cases = [
        {"module": "text", "steps": 4, **SMALL},
        {"module": "curve", "steps": 12, **SMALL, "config": {"stacked": True}},
        {**compiling, "name": "first", "cache": "empty"},
        {**compiling, "name": "again", "cache": "kept"},
    ]
    run = [{**case, "text": str(sample), "limit": 600} for case in cases]
    found = speed_gpu.measure(run, 1e9, tmp_path)
    assert json.loads((tmp_path / "speed_gpu.json").read_text()) == json.loads(json.dumps(found))
    for case in found:
        assert "error" not in case, case["error"]
    on_text, curve, first, again = found
    assert 0 < on_text["data_wait"] < 1
    assert on_text["filled"][1] > 0.8
    assert on_text["share_without_padding"] < on_text["share"]
    exact, at_random, _, eight_bits = (way["nll"] for way in curve["curves"].values())
    np.testing.assert_allclose(eight_bits, at_random, rtol=0.05)
    np.testing.assert_allclose(at_random[0], exact[0], rtol=1e-3)
    np.testing.assert_allclose(at_random, exact, rtol=0.05)
    assert exact[-1] < exact[0]
    assert again["compile_s"] < first["compile_s"]
