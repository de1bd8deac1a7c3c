"""Output for people: if it can no longer be written, the work continues without it."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import select
import sys
from collections.abc import Callable, Iterator
from typing import TextIO, cast

from rich.console import Console
from rich.markup import escape

_GONE = (errno.EIO, errno.EPIPE)  # a terminal that was closed, a pipe without a reader


class _Screen:
    """The current standard output or error; text that cannot be written is dropped.

    If `hurried`, text that would block is dropped too: on a terminal stopped by Ctrl-S, or a pipe
    that is not read.
    """

    def __init__(self, name: str, hurried: bool):
        self._name, self._hurried = name, hurried

    @property
    def _stream(self) -> TextIO:
        stream = getattr(sys, self._name)
        # While Rich draws, it replaces the stream by its own object, which would write to this one.
        return cast(TextIO, getattr(stream, "rich_proxied_file", stream))

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._forgiven() as stream:
            if not self._waits(stream):
                stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._forgiven() as stream:
            if not self._waits(stream):
                stream.flush()

    def _waits(self, stream: TextIO) -> bool:
        try:
            return self._hurried and not select.select([], [stream.fileno()], [], 0)[1]
        except ValueError:  # not a file of the operating system, or closed
            return False

    @contextlib.contextmanager
    def _forgiven(self) -> Iterator[TextIO]:
        stream = self._stream
        try:
            yield stream
        except OSError as error:
            if error.errno in _GONE:  # Python's buffer would fail again at exit
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)


def screen(*, stderr: bool = False, hurried: bool = False) -> Console:
    """A console on standard output or error; `hurried` for output that may be dropped."""
    return Console(file=cast(TextIO, _Screen("stderr" if stderr else "stdout", hurried)))


@contextlib.contextmanager
def working() -> Iterator[Callable[[str], None]]:
    """The block gets a function that says on standard error what it does next.

    A terminal shows it, moving, until the block ends; anywhere else it is a line.
    """
    console = screen(stderr=True)
    if not console.is_terminal:
        yield functools.partial(console.print, markup=False, highlight=False, soft_wrap=True)
        return
    with console.status("starting") as status:
        yield lambda text: status.update(escape(text))
