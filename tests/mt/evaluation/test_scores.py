"""Scores beside sacreBLEU called by hand, resource groups and averages beside plain loops."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import sacrebleu
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from sacrebleu.tokenizers import tokenizer_spm

from gshard.mt.evaluation import scores
from gshard.mt.evaluation.scores import averages, cut_of, resource_groups, score

TEXTS = ["The river saw the bridge.", "A doctor, at noon!", "Silver 3,000 harbours", "je ne sais"]


@pytest.mark.parametrize("target", ["en", "zh", "ja"])
def test_scores_are_sacrebleus(target):
    said, references = TEXTS, [TEXTS[0], "A doctor at the noon!", "Silver harbours", "ich weiss"]
    found = score(said, references, target)
    cut = {"en": "13a", "zh": "zh", "ja": cut_of("ja")}[target]
    bleu = sacrebleu.metrics.BLEU(tokenize=cut)
    assert found.bleu == bleu.corpus_score(said, [references]).score
    assert found.chrf == sacrebleu.corpus_chrf(said, [references], word_order=2).score
    assert f"tok:{cut}" in found.bleu_signature
    assert "nw:2" in found.chrf_signature
    assert cut_of("ja") in ("ja-mecab", "char")


def test_spbleu_is_given_where_its_pieces_are(tokenizer, tmp_path, monkeypatch):
    """The pieces are those of some vocabulary here; sacreBLEU looks for the file by its name."""
    said, references = TEXTS, [TEXTS[0], "A doctor at the noon!", "Silver harbours", "ich weiss"]
    place = tmp_path / "models" / scores.SPBLEU_MODEL.name
    monkeypatch.setattr(scores, "SPBLEU_MODEL", place)
    assert score(said, references).spbleu is None  # and nothing is fetched
    tokenizer.save(tmp_path / "vocabulary")
    place.parent.mkdir()
    shutil.copy(tmp_path / "vocabulary" / "target.model", place)
    monkeypatch.setattr(tokenizer_spm, "SACREBLEU_DIR", str(tmp_path))
    found = score(said, references)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(place))
    sides = [
        [" ".join(pieces.encode(text, out_type=str)) for text in s] for s in (said, references)
    ]
    plain = sacrebleu.metrics.BLEU(tokenize="none", force=True)
    assert found.spbleu == pytest.approx(plain.corpus_score(sides[0], [sides[1]]).score)
    assert found.spbleu != pytest.approx(found.bleu)
    assert "tok:flores200" in found.spbleu_signature


def test_the_corpus_is_scored_as_a_whole_not_sentence_by_sentence():
    references = [TEXTS[0], "A doctor at noon, and another one, came to the long bridge."]
    said = TEXTS[:2]
    sentences = [score([s], [r]).bleu for s, r in zip(said, references, strict=True)]
    assert abs(score(said, references).bleu - np.mean(sentences)) > 1


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=110))
def test_groups_are_the_first_and_last_quarter(counts):
    pairs = {f"l{i}": n for i, n in enumerate(counts)}
    groups = resource_groups(SimpleNamespace(count=pairs.__getitem__), list(pairs))
    sizes = [list(groups.values()).count(g) for g in ("high", "mid", "low")]
    assert sizes[0] == sizes[2]
    if len(counts) >= 4:
        assert sizes[0] == len(counts) // 4
    if len(counts) == 102:
        assert sizes == [25, 52, 25]
    rank = {"high": 0, "mid": 1, "low": 2}
    for a in pairs:
        for b in pairs:
            if rank[groups[a]] < rank[groups[b]]:
                assert pairs[a] >= pairs[b]


def test_a_hundred_and_two_languages():
    groups = resource_groups(SimpleNamespace(count=int), [str(n) for n in range(102)])
    assert [list(groups.values()).count(g) for g in ("high", "mid", "low")] == [25, 52, 25]


def test_averages_beside_a_plain_loop():
    rng = np.random.default_rng(0)
    tasks = {}
    for i in range(9):
        group = ("high", "mid", "low")[i % 3]
        tasks[f"{i}-en"] = {
            "group": group,
            "target": "en",
            "bleu": float(rng.uniform(0, 50)),
            "chrf": float(rng.uniform(0, 50)),
            "copy_bleu": 1.0,
        }
    tasks["1-en"]["few"] = True
    found = averages(tasks)
    assert set(found) == {"all", "high", "mid", "low"}
    for group in found:
        total = count = few = 0
        for task in tasks.values():
            if group in ("all", task["group"]):
                if task.get("few"):
                    few += 1
                else:
                    total, count = total + task["bleu"], count + 1
        assert found[group]["bleu"] == pytest.approx(total / count)
        assert (found[group]["tasks"], found[group]["few"]) == (count, few)
        assert "untrained_bleu" not in found[group]


def test_averages_of_few_only_and_of_both_directions():
    one = {"group": "mid", "bleu": 10.0, "few": True}
    tasks = {"de-en": {**one, "target": "en"}, "en-de": {**one, "target": "de", "bleu": 20.0}}
    found = averages(tasks)
    assert found["all"] == {"tasks": 2, "few": 0, "bleu": 15.0}
    assert found["to-english"]["bleu"] == 10
    assert found["from-english"]["bleu"] == 20
    assert "high" not in found
