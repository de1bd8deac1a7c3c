import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gshard.mt.data import labels

# Few words, so that sentences are close by chance.
WORDS = st.sampled_from("abcdefgh")
SENTENCES = st.lists(WORDS, max_size=14).map(" ".join)


def is_close(one, other):
    """Slowly, pair by pair, as the definition is written."""
    a, b = one.split(), other.split()
    shorter, longer = sorted((a, b), key=len)
    if len(longer) - len(shorter) <= 1:
        if len(a) == len(b):
            within = sum(x != y for x, y in zip(a, b, strict=True)) <= 1
        else:
            within = any(longer[:i] + longer[i + 1 :] == shorter for i in range(len(longer)))
        if within:
            return True
    alike = a and b and len({*a} & {*b}) >= 0.8 * len({*a} | {*b})
    windows = [{tuple(x[i : i + 8]) for i in range(len(x) - 7)} for x in (a, b)]
    return bool(alike or windows[0] & windows[1])


@given(st.lists(SENTENCES, max_size=12), st.lists(SENTENCES, max_size=12))
@settings(max_examples=150)
def test_close_sentences_are_those_of_a_loop(held, training):
    held = [text for text in held if text]
    training = [text for text in training if text]
    expected = [any(is_close(text, other) for other in training) for text in held]
    assert labels.close(held, training).tolist() == expected


def test_each_reason_by_itself():
    sentence = "the quick brown fox jumps over the lazy dog again"
    phrase = "quick brown fox jumps over the lazy dog"
    for training, expected in (
        (sentence.replace("quick", "slow"), True),
        (sentence.replace(" quick", ""), True),
        (sentence + " today", True),
        (" ".join(sentence.split()[::-1]), True),  # the same words
        (f"here is one where a {phrase} is in the middle of other words", True),
        (f"here is one where a {phrase.replace('over', 'past')} is in other words", False),
        ("nothing of it", False),
    ):
        assert labels.close([sentence], [training]).tolist() == [expected], training
    # A word moved by one place is two changes, and five words of seven are not alike.
    assert not labels.close(["a b c d e"], ["a x b c d f"]).any()
    assert not labels.close(["a b c d e"], []).any()


def test_parts_make_no_difference(monkeypatch):
    draw = random.Random(0)
    texts = [" ".join(draw.choices("abcdefghijkl", k=draw.randint(1, 12))) for _ in range(300)]
    expected = labels.close(texts[:50], texts[50:]).tolist()
    monkeypatch.setattr(labels, "_PART", 7)
    assert labels.close(texts[:50], iter(texts[50:])).tolist() == expected
    assert len(set(expected)) == 2


@pytest.mark.slow
def test_time_grows_with_the_text_and_not_with_its_square():
    draw = random.Random(0)
    words = [f"w{n}" for n in range(20_000)]
    weights = [1 / (n + 1) for n in range(len(words))]
    texts = [" ".join(draw.choices(words, weights, k=9)) for _ in range(220_000)]
    seconds = []
    for count in (50_000, 200_000):
        began = time.process_time()
        labels.close(texts[-20_000:], texts[:count])
        seconds.append(time.process_time() - began)
    assert seconds[1] < 8 * seconds[0]
