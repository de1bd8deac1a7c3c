"""Translators for tests of what is around them: one that waits, and one without a model."""

import threading
import time

from gshard.mt.decoding.texts import Hypothesis, TextTranslator, TranslateConfig
from gshard.mt.decoding.translator import Translator
from tests.mt.runs import MODEL


class Echo(TextTranslator):
    """Translates into capital letters; a text with "fail" in it cannot be translated."""

    def search(self, source, forced=None):
        raise NotImplementedError  # the server calls `translate` alone

    routings = search

    def translate(self, texts, target="en", progress=None, source=""):
        if any("fail" in text for text in texts):
            raise RuntimeError("the model is broken")
        return [[Hypothesis(text.upper(), 0.0)] for text in texts]


def echo(tokenizer):
    return Echo(tokenizer, TranslateConfig(longest=24), MODEL, 10)


class Slow:
    """A translator that waits to be let on before each batch, and remembers what was in it."""

    def __init__(self, translator):
        self.on = threading.Semaphore(0)
        self.batches, self._translator = [], translator

    def __getattr__(self, name):
        return getattr(self._translator, name)

    def translate(self, pieces, target="en", source=""):
        self.batches.append(list(pieces))
        assert self.on.acquire(timeout=240)
        return self._translator.translate(pieces, target)


def slow_translator(model, tokenizer):
    settings = TranslateConfig(beam=3, nbest=3, rows=6, longest=24, most=10)
    return Slow(Translator(model, tokenizer, config=settings))


def until(true):
    deadline = time.monotonic() + 240
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)
