"""Requests that wait, share batches, are given up, and do not hold each other up."""

import functools

import numpy as np
import pytest

from gshard.mt.batching.tokenizer import END
from gshard.mt.decoding.search import Translations
from gshard.mt.decoding.texts import TranslateConfig
from gshard.mt.decoding.translator import Translator
from gshard.mt.serving import service as services
from gshard.mt.serving.observing import start_logs
from gshard.mt.serving.service import RefusedError, Service
from gshard.nn import Strategy
from tests.mt.runs import random_model
from tests.mt.samples import sentence
from tests.mt.serving.slow_translator import Slow, slow_translator, until


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


class Counted(Translator):
    """A translator whose programs say nothing, at once; it notes what it compiles and runs."""

    def compiled(self, name, fn, *shapes):
        if (name, shapes) not in self._with_weights:
            self.made = [*getattr(self, "made", []), (name, *shapes[0])]
            self._with_weights[name, shapes] = functools.partial(self.run, shapes[0])
        return self._with_weights[name, shapes]

    def run(self, shape, source):
        self.ran = [*getattr(self, "ran", []), (shape, int(np.any(source, axis=1).sum()))]
        rows, nbest = len(source), self.config.nbest
        ends = np.full((rows, nbest, 1), END)
        return Translations(ends, np.zeros((rows, nbest)), np.ones((rows, nbest), int), 1)


def test_more_may_wait_while_all_are_answered_soon(model, tokenizer, monkeypatch):
    monkeypatch.setattr(services, "WAITING", 1)
    slow = Slow(Counted(model, tokenizer, config=TranslateConfig(rows=6, longest=24, most=10)))
    service = Service(slow)
    answers = [service.submit_pieces(["a", "b"], "de")]
    with pytest.raises(RefusedError, match="too many requests wait"):  # no rate is known yet
        service.submit_pieces(["c"], "de")
    service._note_rate(4.0, 2)
    answers += [service.submit_pieces([f"{n}"], "de") for n in range(13)]
    assert service._seconds_waiting() == 30.0
    answers.append(service.submit_pieces(["d"], "de"))
    with pytest.raises(RefusedError, match="too many requests wait"):
        service.submit_pieces(["e"], "de")
    for _ in range(9):
        slow.on.release()
    assert all(answer.result(240) for answer in answers)


def test_programs_are_as_large_as_what_waits(model, tokenizer, monkeypatch):
    monkeypatch.setattr(services, "routes", lambda *given: {"source": [], "output": []})
    translator = Counted(model, tokenizer, config=TranslateConfig(rows=20, longest=24, most=10))
    assert translator.row_counts == (1, 2, 4, 8, 16, 20)
    slow = Slow(translator)
    service = Service(slow)
    service.warm_up()
    until(lambda: service.health["status"] == "ready")
    first = [(n, length) for length in (16, 24) for n in (1, 20)]
    assert [(n, length) for name, n, length in translator.made if name == "search"] == first

    def round_of(count):
        """What runs for so many short texts that wait together."""
        held = service.submit({"text": "a", "target": "de"})
        until(lambda: len(slow.batches) % 2)
        waiting = [service.submit({"text": f"b{n}", "target": "de"}) for n in range(count)]
        slow.on.release(2)
        for answer in (held, *waiting):
            assert answer.result(60)["target"] == "de"
        until(lambda: not service.health["waiting"])
        until(lambda: not service.health["compiling"])
        return translator.ran[-1]

    assert round_of(1) == ((1, 16), 1)
    assert round_of(7) == ((20, 16), 7)  # nobody waits for a compilation ...
    assert round_of(7) == ((8, 16), 7)  # ... and the next time there is a program
    assert round_of(5) == ((8, 16), 5)
    assert round_of(3) == ((8, 16), 3)
    assert round_of(3) == ((4, 16), 3)
    assert round_of(16) == ((20, 16), 16)
    assert round_of(18) == ((20, 16), 18)
    more = [made for made in translator.made if made not in {("search", *f) for f in first}]
    assert [made for made in more if made[0] == "search"] == [
        ("search", 8, 16),
        ("search", 4, 16),
        ("search", 16, 16),
    ]  # each once, and only what was missed


@pytest.mark.parametrize(("devices", "rows"), [(1, 4), (2, 8)])
@pytest.mark.slow
def test_a_translation_is_the_same_in_every_program(model, tokenizer, devices, rows):
    settings = TranslateConfig(beam=2, nbest=2, rows=rows, longest=16, most=10)
    texts = [" ".join(sentence(n).split()[:4]) for n in range(rows)]
    alone = Translator(model, tokenizer, config=settings)
    want = [alone.translate([text], "de")[0] for text in texts]
    translator = Translator(model, tokenizer, Strategy(devices), settings)
    service = Service(translator)
    service.warm_up()  # compiles in one thread while the other translates, and compiles too
    counts = (1, 2, 3, rows, 2, 3)
    for count in counts:
        answers = [service.submit({"text": text, "target": "de"}) for text in texts[:count]]
        for answer, hypotheses in zip(answers, want, strict=False):
            said = answer.result(240)["alternatives"]
            assert [each["text"] for each in said] == [h.text for h in hypotheses]
            scores = [h.score for h in hypotheses]
            np.testing.assert_allclose([each["score"] for each in said], scores, rtol=1e-5)
    until(lambda: not service.health["compiling"])
    for n in translator.row_counts:  # those that were missed, and those that were not
        translator.search_program(n, 16)
        assert translator._rows(n, 16) == n
        for hypotheses, found in zip(want, translator.translate(texts[:n], "de"), strict=False):
            assert [h.tokens for h in hypotheses] == [h.tokens for h in found]


def test_a_program_that_cannot_be_compiled_is_done_without(model, tokenizer, monkeypatch, capfd):
    monkeypatch.setattr(services, "routes", lambda *given: {"source": [], "output": []})

    class Refusing(Counted):
        def compiled(self, name, fn, *shapes):
            if name == "search" and shapes[0][0] == 20:
                raise RuntimeError("no room for it")
            return super().compiled(name, fn, *shapes)

    settings = TranslateConfig(rows=20, longest=24, most=10)
    start_logs("none")
    service = Service(Refusing(model, tokenizer, config=settings))
    service.warm_up()
    until(lambda: service.health["status"] == "ready")
    assert service.submit({"text": "a", "target": "de"}).result()["target"] == "de"
    assert "no room for it" in capfd.readouterr().err
