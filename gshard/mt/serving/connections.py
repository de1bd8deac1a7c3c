"""Idle connections are closed.

Uvicorn limits the time between two requests, and neither that of a request's head nor that in which
a client takes its answer. Here a connection has as long for both. And there are fewer connections
than descriptors: one too many ends the one that has let the server wait for longest.
"""

from __future__ import annotations

import asyncio
import itertools
import resource

from uvicorn.protocols.http.h11_impl import H11Protocol

SECONDS = 10.0  # from a connection's begin, or its last answer, to the head of its next request
_MOST = 1000
_turns = itertools.count()


def most_connections() -> int:
    """How many connections to have at once: the other descriptors are for files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else max(1, min(_MOST, soft // 2))


class Connection(H11Protocol):
    """A connection whose client has to send something, or take what was sent to it."""

    _timer: asyncio.TimerHandle | None = None
    _turn = 0  # loops that tell the time by the millisecond would have ties

    @property
    def _waits(self) -> bool:
        """Whether the server waits for the client, and not the client for an answer."""
        return self.cycle is None or self.cycle.response_complete or self.flow.write_paused

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin."""
        super().connection_made(transport)
        self._wait()
        # Connections that are ended already are listed until the loop comes to them.
        there = [c for c in self.connections if not c.transport.is_closing()]
        if len(there) > most_connections():
            waiting = [c for c in there if isinstance(c, Connection) and c._waits]
            min(waiting, key=lambda connection: connection._turn).transport.abort()

    def handle_events(self) -> None:
        """Take what has arrived."""
        super().handle_events()
        if not self._waits:
            self._end_timer()

    def on_response_complete(self) -> None:
        """An answer is handed to the system, which may not have sent it yet."""
        self._wait()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """There is more of an answer than the client has taken."""
        super().pause_writing()
        self._wait()

    def resume_writing(self) -> None:
        """It has taken most of that."""
        super().resume_writing()
        if not self._waits:
            self._end_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._end_timer()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._end_timer()
        self._turn = next(_turns)
        # Not `close`, which waits until the client has taken everything.
        self._timer = self.loop.call_later(SECONDS, self.transport.abort)

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
