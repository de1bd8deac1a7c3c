"""The translation of the most similar training sentence, found by a plain loop too."""

from types import SimpleNamespace

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from gshard.mt.batching.tokenizer import Task
from gshard.mt.evaluation.evaluate import from_training


def corpus_of(pairs):
    columns = {
        "source": [foreign for foreign, _ in pairs],
        "english": [english for _, english in pairs],
    }
    return SimpleNamespace(read=lambda language, split, names: pa.table(columns).select(names))


def trigrams(text):
    text = f" {text.lower()} \0"
    return {text[i : i + 3] for i in range(len(text) - 2)}


def similarity(one, other):
    a, b = trigrams(one), trigrams(other)
    return len(a & b) / len(a | b)


WORDS = st.text(st.sampled_from("abAé漢\0 \U0001f600"), max_size=12)


@given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=12), st.lists(WORDS, max_size=5))
def test_no_training_sentence_is_more_similar(pairs, sources):
    for task, known in (
        (Task("de", "en"), pairs),
        (Task("en", "de"), [(english, foreign) for foreign, english in pairs]),
    ):
        found = from_training(corpus_of(pairs), task, sources)
        assert len(found) == len(sources)
        for source, target in zip(sources, found, strict=True):
            first = max(known, key=lambda pair: similarity(pair[0], source))
            assert target == first[1]


def test_a_language_without_training_text():
    assert from_training(corpus_of([]), Task("de", "en"), ["eins"]) == [""]
