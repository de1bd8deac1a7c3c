"""The detector of languages, on made-up languages and on a corpus."""

import pydoc_data.topics
import subprocess
import sys

import numpy as np
import pytest

from gshard.errors import UserError
from gshard.mt.decoding.detect import Detector, _counts, accuracy
from gshard.mt.training.weights import write_weights


def test_a_corpus_of_made_up_languages(corpus, tmp_path):
    detector = Detector.of(corpus, corpus.languages)
    shares = accuracy(corpus, detector)
    assert set(shares) >= {"de", "ru"}
    assert min(shares["de"], shares["ru"]) == 1.0
    assert detector.detect("The river saw the mountain today.")[0].language == "en"
    detector.save(tmp_path / "d.safetensors")
    loaded = Detector.load(tmp_path / "d.safetensors")
    assert loaded.languages == detector.languages
    assert accuracy(corpus, loaded) == shares


def test_a_server_reads_its_table_in_bfloat16_before_jax_is_imported(tmp_path):
    Detector.train({"en": ["A river."], "de": ["Ein Fluss."]}).save(tmp_path / "d.safetensors")
    program = (
        "import sys; from pathlib import Path; from gshard.mt.decoding.detect import Detector;"
        "assert 'jax' not in sys.modules;"
        f"print(*Detector.load(Path({str(tmp_path)!r}) / 'd.safetensors').languages)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["en", "de"], done.stderr


@pytest.mark.parametrize(
    ("table", "note"),
    [
        (np.zeros((2, 1 << 15)), {}),
        (np.zeros((0, 1 << 15)), {"languages": ""}),
        (np.zeros((2, 1 << 15)), {"languages": "en de fr"}),
        (np.zeros((2, 9)), {"languages": "en de"}),
    ],
)
def test_a_file_that_is_none(tmp_path, table, note):
    write_weights(tmp_path / "d.safetensors", {"table": table.astype(np.float32)}, note)
    with pytest.raises(UserError, match="is damaged: it has no table of"):
        Detector.load(tmp_path / "d.safetensors")


def test_text_without_letters_has_no_language(corpus):
    detector = Detector.of(corpus, corpus.languages)
    for text in ("", "123", "\u200b", "👍 !", " \n"):
        assert detector.detect(text) == []
    assert detector.detect("\ud800 a" * 5000)


def test_confidence_is_a_share(corpus):
    detector = Detector.of(corpus, corpus.languages)
    found = detector.detect("The river", 99)
    assert 99 <= sum(each.confidence for each in found) <= 100.5
    assert [each.confidence for each in found] == sorted(f.confidence for f in found)[::-1]


def test_a_language_that_was_not_learned_gets_little_confidence():
    """English by Python's own manual, the even paragraphs to learn from, the odd ones to test."""
    text = "\n\n".join(pydoc_data.topics.topics.values())
    prose = [p for p in text.split("\n\n") if len(p) > 200 and not p.startswith("   ")]
    detector = Detector.train({"en": prose[::2]})
    learned = [detector.detect(p[:80], 1)[0].confidence for p in prose[1:201:2]]
    assert np.median(learned) > 90
    unknown = [
        "Die Datei konnte nicht geöffnet werden, weil sie von einem anderen Programm benutzt wird.",
        "Voulez-vous vraiment supprimer cette page et tous les documents qui en dépendent ?",
        "Wybierz katalog, w którym mają zostać zapisane nowe ustawienia użytkownika.",
        "Het bestand dat u wilt openen is door een ander programma in gebruik genomen.",
    ]
    assert max(detector.detect(text, 1)[0].confidence for text in unknown) < 50


def test_every_n_gram_is_counted():
    counts = _counts("ab")  # with a space on both sides: 4 + 3 + 2 + 1 n-grams
    assert counts.sum() == 10
    assert np.array_equal(_counts("A 1 b"), _counts("a  2\nB"))
