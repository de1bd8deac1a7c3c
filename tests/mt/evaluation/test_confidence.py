"""A model's own view of its outputs and of the references."""

import numpy as np
import pytest

from benchmarks.confidence import (
    Confidence,
    _parts,
    confidence,
    forced,
    tables,
)
from gshard.mt.batching.tokenizer import START
from gshard.mt.evaluation.evaluate import EvaluateConfig
from gshard.mt.evaluation.scores import score
from gshard.mt.run import Run
from gshard.mt.training.loading import load_model
from gshard.nn import Batch
from tests.mt.runs import make_run


def test_outputs_are_looked_at_by_the_length_of_the_reference():
    references = ["a b c", "a b c d e f", "a b", " ".join("abcdefghijklmnopqrstuvwxyz")]
    texts = ["a b c", "a b c", "x y", "a b c d e f g h i j k l m"]
    parts = {part.name: part for part in _parts(texts, references)}
    assert {name: part.sentences for name, part in parts.items()} == {
        "0 to 5 words": 2,
        "6 to 9 words": 1,
        "20 words and more": 1,
    }
    assert [part.length for part in parts.values()] == [1, 0.5, 0.5]
    short = score(["a b c", "x y"], ["a b c", "a b"]).chrf
    assert parts["0 to 5 words"].chrf == pytest.approx(short)
    found = Confidence("m", score(texts, references), 0.6, 2.0, 0.5, 0.25, 1e-4, (*parts.values(),))
    lines = tables([found]).splitlines()
    assert lines[2].endswith("| 0.60 | 2.000 | 0.500 | 25.0% |")
    assert "| m | 6 to 9 words | 1 |" in lines[7]


@pytest.mark.slow
def test_search_and_forward_pass_agree_on_what_an_output_is_worth(corpus, tokenizer, tmp_path):
    run = Run.open(make_run(tmp_path / "run", tokenizer).folder)
    run.__dict__["corpus"] = corpus
    model, _ = load_model(run, "last")
    found = confidence(run, model, EvaluateConfig(sentences=3, beam=2))
    assert found.search_error < 1e-3
    assert found.output_nll < found.reference_nll
    assert 0 <= found.preferred <= 1


@pytest.mark.slow
def test_forced_is_the_sum_over_the_tokens_of_a_sentence(tokenizer, tmp_path):
    model, _ = load_model(make_run(tmp_path / "run", tokenizer), "last")
    sources, targets = [[5, 6, 3], [7, 3]], [[4, 3], [9, 8, 7, 3]]
    got = forced(model, sources, targets, rows=2)
    for source, target, worth in zip(sources, targets, got, strict=True):
        batch = Batch.of(np.array([source]), np.array([target]), start=START)
        logits = np.asarray(model(batch, dropless=True)[0][0], np.float64)
        log_z = np.log(np.exp(logits).sum(axis=1))
        assert worth == pytest.approx(sum(logits[range(len(target)), target] - log_z), rel=1e-4)
