"""A translator that waits to be let on: for tests of what happens meanwhile."""

import threading
import time

from gshard.mt.decoding.texts import TranslateConfig
from gshard.mt.decoding.translator import Translator


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
