"""One process leads, and the others do as it does: commands that are not the same everywhere.

A program over the devices of several processes runs when all of them call it, in one order. A
training is the same on every process by itself; but one process reads text, looks up what is done
already and waits for a person. That one sends what it is about to run, and the others repeat it.
Messages go through JAX's coordination service, and not through a collective: those who receive them
may have to wait for an hour.
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
_KEPT = 8  # messages that are not deleted yet: a program's result means that all received it


class Message(NamedTuple):
    """What is to be run: its kind, whose it is, and its arguments."""

    kind: str
    whose: str
    arrays: list[np.ndarray]
    step: int  # how far the leader is


class Broadcast:
    """This process among those of its command; it sends while it leads, if there are others."""

    def __init__(self, reporter: Reporter | None = None):
        self._reporter = reporter or Reporter()
        self._sent, self._leads = 0, False
        self.step = 0  # what was done, also by attempts before this one

    @contextlib.contextmanager
    def leading(self) -> Iterator[Broadcast]:
        """While the block runs the others follow; at its end they are notified."""
        self._reporter.tell(WAITING)
        self._leads = _jax.process_count() > 1
        try:
            yield self
        finally:
            self._send(Message(_END, "", [], self.step))
            self._leads = False

    @contextlib.contextmanager
    def running(self, kind: str, whose: str, *arrays: np.ndarray) -> Iterator[None]:
        """The others run this too, while the block does."""
        self.step += 1
        self._send(Message(kind, whose, list(arrays), self.step))
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

    def receive(self) -> Iterator[Message]:
        """What the leader runs, one after the other, until it ends."""
        for number in itertools.count():
            self._reporter.tell(WAITING)
            message = unpacked(_listen(_key(number)))
            if message.kind == _END:
                return
            self._reporter.tell(_DOING[message.kind], message.step)
            yield message

    def _send(self, message: Message) -> None:
        if not self._leads:
            return
        client = _jax.coordination()
        client.key_value_set_bytes(_key(self._sent), packed(message))
        if self._sent >= _KEPT:
            client.key_value_delete(_key(self._sent - _KEPT))
        self._sent += 1


def meet(name: str) -> None:
    """Return when all processes are here, however long the slowest takes."""
    if _jax.process_count() == 1:
        return
    import jax

    client = _jax.coordination()
    client.key_value_set_bytes(f"gshard/{name}/{jax.process_index()}", b"")
    for process in range(jax.process_count()):
        _listen(f"gshard/{name}/{process}")


def packed(message: Message) -> bytes:
    """A message as bytes: an archive of arrays, and nothing that is executed when it is read."""
    file = io.BytesIO()
    head = np.array([message.kind, message.whose, str(message.step)])
    arrays: Any = {str(i): array for i, array in enumerate(message.arrays)}
    np.savez(file, head=head, **arrays)
    return file.getvalue()


def unpacked(raw: bytes) -> Message:
    """The message that `packed` made those bytes of."""
    with np.load(io.BytesIO(raw)) as file:
        kind, whose, step = map(str, file["head"])
        return Message(kind, whose, [file[str(i)] for i in range(len(file.files) - 1)], int(step))


def _key(number: int) -> str:
    return f"gshard/broadcast/{number}"


def _listen(key: str) -> bytes:
    """The value of a key, as soon as it is set; an error when process 0 is gone."""
    import jax

    while True:
        try:
            return bytes(_jax.coordination().blocking_key_value_get_bytes(key, _LISTEN))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
