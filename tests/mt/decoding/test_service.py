"""Requests that wait, share batches, are given up, and do not hold each other up."""

import pytest

from gshard.mt.decoding import service as services
from gshard.mt.decoding.service import RefusedError, Service
from gshard.mt.decoding.translator import TranslateConfig, Translator
from tests.mt.decoding.slow_translator import slow_translator, until
from tests.mt.runs import random_model
from tests.mt.samples import sentence


@pytest.fixture(scope="module")
def model(tokenizer):
    return random_model(tokenizer)


@pytest.fixture
def slow(model, tokenizer):
    return slow_translator(model, tokenizer)


@pytest.mark.slow
def test_those_who_wait_are_translated_together_and_nobody_waits_for_a_long_text(slow):
    service = Service(slow)
    first = service.submit({"text": "a", "target": "de"})
    until(lambda: slow.batches)
    text = " ".join(f"{sentence(n)}" for n in range(9))
    long = service.submit({"text": text, "target": "de"})
    others = [service.submit({"text": f"b{n}", "target": "de"}) for n in range(2)]
    for _ in range(2):
        slow.on.release()
    for answer in (first, *others):
        assert answer.result(240)
    assert not long.done()
    assert slow.batches[1][-2:] == ["b0", "b1"]  # beside a few pieces of the long one
    assert len(slow.batches[1]) == 6
    for _ in range(20):
        slow.on.release()
    assert len(long.result(240)["parts"]) > 8


@pytest.mark.slow
def test_the_queue_is_bounded_and_the_wait_too(slow, monkeypatch):
    service = Service(slow)
    monkeypatch.setattr(services, "WAITING", 3)
    answers = [service.submit({"text": f"a{n}", "target": "de"}) for n in range(3)]
    with pytest.raises(RefusedError, match="too many requests wait") as refused:
        service.submit({"text": "b", "target": "de"})
    assert refused.value.status == 503
    assert service.health["waiting"] == 3
    for _ in range(3):
        slow.on.release()
    for answer in answers:
        answer.result(240)
    monkeypatch.setattr(services, "SECONDS", -1.0)
    service._ready_at = 0.0
    long = service.submit({"text": " ".join(sentence(n) for n in range(30)), "target": "de"})
    for _ in range(9):
        slow.on.release()
    with pytest.raises(RefusedError, match="was given up"):
        long.result(240)


def test_rare_characters_that_would_take_minutes_are_refused(model, tokenizer, monkeypatch):
    monkeypatch.setattr(services, "PIECES", 10)
    translator = Translator(model, tokenizer, config=TranslateConfig(longest=24, most=10))
    with pytest.raises(RefusedError, match="too much for one request") as refused:
        Service(translator).submit({"text": "\U00012000" * 400, "target": "de"})
    assert refused.value.status == 413
