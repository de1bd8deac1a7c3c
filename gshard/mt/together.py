"""One process leads, and the others do as it does: commands that are not the same everywhere.

A program over the devices of several processes runs when all of them call it, in one order. A
training is the same on every process by itself; but one process reads text, looks up what is done
already and waits for a person. That one says what it is about to run, and the others repeat it.
What it says goes through JAX's coordination service, and not through a collective: those who
listen may have to wait for an hour.
"""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from gshard.mt import _jax
from gshard.mt.launch.status import ALONE, WAITING, Reporter

_END = "end"
_DOING = {"load": "loading", "search": "translating", "route": "counting"}  # in a status
_LISTEN = 20_000  # milliseconds at a time
_KEPT = 8  # words that are not forgotten yet: a program's result means that all have heard of it


class Words(NamedTuple):
    """What is to be run: its kind, whose it is, and its arguments."""

    kind: str
    whose: str
    arrays: list[np.ndarray]
    step: int  # how far the leader is


class Together:
    """This process among those of its command; it speaks while it leads, if there are others."""

    def __init__(self, reporter: Reporter | None = None):
        self._reporter = reporter or Reporter()
        self._said, self._leads = 0, False
        self.step = 0  # what was done, also by attempts before this one

    @contextlib.contextmanager
    def leading(self) -> Iterator[Together]:
        """While the block runs the others follow; at its end they are notified."""
        self._reporter.tell(WAITING)
        self._leads = _jax.process_count() > 1
        try:
            yield self
        finally:
            self._say(Words(_END, "", [], self.step))
            self._leads = False

    @contextlib.contextmanager
    def running(self, kind: str, whose: str, *arrays: np.ndarray) -> Iterator[None]:
        """The others run this too, while the block does."""
        self.step += 1
        self._say(Words(kind, whose, list(arrays), self.step))
        self._reporter.tell(_DOING[kind], self.step)
        yield
        self._reporter.tell(WAITING)

    def alone(self) -> None:
        """From now on this process works by itself."""
        self._reporter.tell(ALONE)

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """This process compiles, which takes it long."""
        before = self._reporter.doing
        self._reporter.tell("compiling")
        yield
        self._reporter.tell(before)

    def heard(self) -> Iterator[Words]:
        """What the leader runs, one after the other, until it ends."""
        for number in itertools.count():
            self._reporter.tell(WAITING)
            words = unpacked(_listen(_key(number)))
            if words.kind == _END:
                return
            self._reporter.tell(_DOING[words.kind], words.step)
            yield words

    def _say(self, words: Words) -> None:
        if not self._leads:
            return
        client = _jax.coordination()
        client.key_value_set_bytes(_key(self._said), packed(words))
        if self._said >= _KEPT:
            client.key_value_delete(_key(self._said - _KEPT))
        self._said += 1


def meet(name: str) -> None:
    """Return when all processes are here, however long the slowest takes."""
    if _jax.process_count() == 1:
        return
    import jax

    client = _jax.coordination()
    client.key_value_set_bytes(f"gshard/{name}/{jax.process_index()}", b"")
    for process in range(jax.process_count()):
        _listen(f"gshard/{name}/{process}")


def packed(words: Words) -> bytes:
    """Words as bytes: an archive of arrays, and nothing that is executed when it is read."""
    file = io.BytesIO()
    said = np.array([words.kind, words.whose, str(words.step)])
    arrays: Any = {str(i): array for i, array in enumerate(words.arrays)}
    np.savez(file, said=said, **arrays)
    return file.getvalue()


def unpacked(raw: bytes) -> Words:
    """The words that `packed` made those bytes of."""
    with np.load(io.BytesIO(raw)) as file:
        kind, whose, step = map(str, file["said"])
        return Words(kind, whose, [file[str(i)] for i in range(len(file.files) - 1)], int(step))


def _key(number: int) -> str:
    return f"gshard/together/{number}"


def _listen(key: str) -> bytes:
    """The value of a key, as soon as it is set; an error when process 0 is gone."""
    import jax

    while True:
        try:
            return bytes(_jax.coordination().blocking_key_value_get_bytes(key, _LISTEN))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
