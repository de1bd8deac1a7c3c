"""What experts tell about languages, on loads whose answer is known."""

import numpy as np
import pytest

from benchmarks.studied import copied, information, layers_of, nearest_other, training_targets


def test_equal_loads_tell_nothing_and_an_expert_of_ones_own_tells_all():
    assert information(np.full((4, 8), 1 / 8)) == pytest.approx(0)
    assert information(np.eye(4)) == pytest.approx(2)  # bits: one of four languages


def test_information_is_that_of_the_definition():
    shares = np.random.default_rng(0).dirichlet(np.ones(5), size=7)
    joint = shares / 7
    by_hand = sum(
        joint[t, e] * np.log2(joint[t, e] / (joint[t].sum() * joint[:, e].sum()))
        for t in range(7)
        for e in range(5)
    )
    assert information(shares) == pytest.approx(by_hand)


def test_the_nearest_language_is_another_one():
    shares = np.array([[0.9, 0.1, 0.0], [0.8, 0.2, 0.0], [0.0, 0.1, 0.9], [0.0, 0.3, 0.7]])
    assert nearest_other(shares) == [1, 0, 3, 2]


def test_layers_come_in_order_and_a_dense_model_has_none():
    loads = {"de-en": [[1.0, 0.0], [0.5, 0.5]], "fr-en": [[0.0, 1.0], [0.5, 0.5]]}
    found = layers_of({"encoder": loads, "decoder": loads})
    assert [(use.side, use.layer) for use in found] == [
        ("encoder", 0),
        ("encoder", 1),
        ("decoder", 0),
        ("decoder", 1),
    ]
    assert [use.bits for use in found] == pytest.approx([1, 0, 1, 0])
    assert found[0].nearest == {"de-en": "fr-en", "fr-en": "de-en"}
    assert layers_of({}) == []


def test_an_output_that_is_in_the_training_text_is_verbatim():
    outputs = {"en": [("a b c", "a b c d"), ("x", "y"), ("p q", "p q")], "de": [("ja", "nein")]}
    found = copied(outputs, {"en": {"a b c", "y"}, "de": {"ja"}})
    assert (found.verbatim, found.exact, found.length) == (2 / 4, 1 / 4, 7 / 8)


def test_the_training_text_is_that_of_the_target_side(corpus, tokenizer):
    texts = training_targets(corpus, tokenizer.tasks)
    assert set(texts) == {"en", "de", "ru", "fr"}
    pairs = list(corpus.pairs("ru"))
    assert texts["ru"] == {source for source, _ in pairs}
    assert {english for _, english in pairs} <= texts["en"]
