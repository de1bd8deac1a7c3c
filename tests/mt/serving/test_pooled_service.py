"""The service of an engine that sentences join and leave, as on an accelerator."""

import functools
import threading

import pytest

from gshard.mt.decoding.texts import TranslateConfig
from gshard.mt.decoding.translator import Translator
from gshard.mt.serving.service import Service
from tests.mt.runs import random_model
from tests.mt.samples import sentence
from tests.mt.serving.slow_translator import until


class Pooled(Translator):
    """A translator that has a pool on a CPU, too."""

    @functools.cached_property
    def pool(self):
        return self.new_pool()


@pytest.fixture(scope="module")
def translator(tokenizer):
    config = TranslateConfig(beam=2, nbest=2, rows=4, longest=24, most=10, shortest=24)
    return Pooled(random_model(tokenizer, experts=0), tokenizer, config=config)


@pytest.fixture(scope="module")
def service(translator):
    return Service(translator)


def texts(n):
    """Pieces of one request."""
    return [sentence(10 * n + k) for k in range(n % 4)] + [["", "  "][n % 2]] * (n % 3 == 0)


def test_everybody_gets_their_own_and_hears_it_in_order(service, translator):
    asked = [(texts(n), ["de", "ru"][n % 2]) for n in range(12)]
    heard = [[] for _ in asked]
    answers = [
        service.submit_pieces(pieces, target, lambda n, _, mine=mine: mine.append(n))
        for (pieces, target), mine in zip(asked, heard, strict=True)
    ]
    for (pieces, target), answer, mine in zip(asked, answers, heard, strict=True):
        got, want = answer.result(240), translator.translate(pieces, target)
        assert [[h.text for h in found] for found in got] == [[h.text for h in w] for w in want]
        assert mine == list(range(len(pieces)))
    assert not service.health["waiting"]


def test_who_left_is_not_searched_and_a_failure_is_everybodys_once(service, translator):
    pool, begun = translator.pool, threading.Event()
    leaving = service.submit_pieces([sentence(1)] * 40, "de", lambda *_: begun.set())
    assert begun.wait(240)
    leaving.cancel()
    assert service.submit_pieces([sentence(2)], "de").result(240)
    assert not len(pool)

    programs, pool._programs = pool._programs, dict.fromkeys(pool._programs, _broken)
    with pytest.raises(MemoryError, match="no memory"):
        service.submit_pieces([sentence(2)], "de").result(240)
    pool._programs = programs
    again = service.submit_pieces([sentence(2)], "de").result(240)
    assert again[0][0].text == translator.translate([sentence(2)], "de")[0][0].text


def _broken(*_):
    raise MemoryError("no memory")


@pytest.mark.slow
def test_all_programs_are_compiled_before_the_first_request(tokenizer):
    config = TranslateConfig(beam=2, nbest=2, rows=10, longest=24, most=10, shortest=24)
    translator = Pooled(random_model(tokenizer, experts=0), tokenizer, config=config)
    service = Service(translator)
    service.warm_up()
    until(lambda: service.health["status"] == "ready")
    there = set(translator.pool._programs)
    assert {key[0] for key in there} == {"empty", "join", "advance", "move"}
    texts = [sentence(n) for n in range(30)]
    assert len(service.submit_pieces(texts, "de").result(240)) == 30
    assert set(translator.pool._programs) == there
    assert not any(key[0] == "search" for key in translator._with_weights)
