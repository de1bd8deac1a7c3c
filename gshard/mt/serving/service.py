"""Translation for many at once: requests wait in a bounded queue, and share batches of the model.

One thread has the model. It works in rounds: each takes pieces of text from the requests that wait,
the oldest first and a few from each, until a batch is full. So a long text does not hold up short
ones, a request whose client has left costs no more rounds, and ten requests take little longer
than one. On an accelerator pieces join and leave a search that goes on (`decoding.pool`), and a
round is some of its steps. A second thread compiles: at first programs for few sentences and for a
full batch, then those that rounds would have fitted into better, so that eight do not wait for a
batch of 32.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

from gshard.errors import UserError
from gshard.mt.decoding.texts import (
    Hypothesis,
    TextTranslator,
    choose_target,
    joined,
    routes,
    well_formed,
)

LONGEST = 5_000  # characters of a text
PIECES = 100  # of a text, each as long as the model can take; rare characters need many
WAITING = 64  # requests that may always wait; more may while all of them are answered within:
SOON = 30.0  # seconds
SECONDS = 60.0  # that PIECES of a request may take, once the programs are compiled
_TURN = 4  # pieces of one request in a round, while others wait
log = logging.getLogger("gshard.serve")


class RefusedError(Exception):
    """A request that is not answered, with HTTP's status for the reason."""

    def __init__(self, status: int, message: str, retry_after: int = 0):
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after or (5 if status == 503 else 0)  # seconds


TOO_MUCH = "pieces of what the model can read at once are too much for one request"


def refuse_more(count: int, most: int, what: str) -> None:
    """An error if a request has more of something than is allowed."""
    if count > most:
        raise RefusedError(413, f"{count:,} {what}; {most:,} are allowed")


@dataclass(frozen=True)
class About:
    """What the page says about the model."""

    name: str
    step: int
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    target: str  # the usual one
    experts: int
    encoder_layers: int
    decoder_layers: int
    weights: int
    longest: int = LONGEST
    needs_source: bool = False  # whether a request has to name the language of its text


Listener = Callable[[int, list[Hypothesis]], None]


@dataclass(eq=False)
class _Request:
    """A request that is being answered: pieces to translate, and those that are done.

    `listener` hears the number of each piece and its translations when it is done.
    """

    target: str
    pieces: list[str]
    arrived: float
    shows_experts: bool = False
    listener: Listener | None = None
    source: str = ""  # "" where the model does not have to know it
    answer: Future[Any] = field(default_factory=Future)
    found: list[tuple[list[Hypothesis], dict[str, Any]]] = field(default_factory=list)
    searched: int = 0  # pieces that have joined a search
    ahead: dict[int, list[Hypothesis]] = field(default_factory=dict)  # done before others

    @property
    def left(self) -> list[str]:
        return self.pieces[len(self.found) :]

    def add(self, hypotheses: list[Hypothesis], shown: dict[str, Any]) -> None:
        """One more piece is translated."""
        self.found.append((hypotheses, shown))
        if self.listener is not None:
            self.listener(len(self.found) - 1, hypotheses)

    def settle(self, answer: Any) -> None:
        with contextlib.suppress(InvalidStateError):  # its client has left just now
            if isinstance(answer, Exception):
                self.answer.set_exception(answer)
            else:
                self.answer.set_result(answer)


class Service:
    """The answers, apart from how they travel."""

    def __init__(self, translator: TextTranslator, name: str = "model", step: int = 0):
        self.translator = translator  # for callers too, for what needs no turn: cutting text
        self._pool = translator.pool
        if self._pool is not None:  # or the device waits 5 ms for Python, whenever it is done
            sys.setswitchinterval(0.0005)
        self._since = 0.0  # when pieces were done last, in a pool that is in use
        self._requests: deque[_Request] = deque()
        self._to_compile: deque[Callable[[], Any]] = deque()
        self._missed: set[tuple[int, int]] = set()  # programs that were asked for since the start
        self._changed = threading.Condition()
        self._seconds_per_piece = float("inf")  # of the last rounds
        self._ready_at: float | None = None  # when the programs of the start were compiled
        tokenizer, dims = translator.tokenizer, translator.model_config
        sources = tuple(sorted({task.source for task in tokenizer.tasks}))
        targets = tuple(sorted({task.target for task in tokenizer.tasks}))
        usual = "en" if "en" in targets else targets[0]
        self.about = About(
            name,
            step,
            sources,
            targets,
            usual,
            dims.experts,
            dims.encoder_layers,
            dims.decoder_layers,
            translator.weights,
            needs_source=tokenizer.needs_source,
        )
        self._worker = threading.Thread(target=self._work, name="translator", daemon=True)
        self._worker.start()

    @property
    def health(self) -> dict[str, Any]:
        """Whether the first programs are compiled, how many are not, and how many requests wait."""
        return {
            "status": "warming up" if self._ready_at is None else "ready",
            "compiling": len(self._to_compile),
            "waiting": len(self._requests),
        }

    @property
    def is_alive(self) -> bool:
        """Whether requests are still being answered."""
        return self._worker.is_alive()

    def submit(self, given: Mapping[str, str]) -> Future[dict[str, Any]]:
        """Put a request of the page into the queue; cancelling the result takes it out again."""
        return self._queue(self._checked(**given))

    def submit_pieces(
        self, pieces: list[str], target: str, listener: Listener | None = None, source: str = ""
    ) -> Future[list[list[Hypothesis]]]:
        """Have pieces translated that are not too long each: the n-best lists of all, in order.

        The translator's thread calls `listener` for each piece as soon as it is done.
        """
        waiting = _Request(target, pieces, time.monotonic(), listener=listener, source=source)
        return self._queue(waiting)

    def _queue(self, waiting: _Request) -> Future[Any]:
        with self._changed:
            if len(self._requests) >= WAITING and self._seconds_waiting() > SOON:
                raise RefusedError(503, "too many requests wait here; try again in a moment")
            self._requests.append(waiting)
            self._changed.notify_all()
        return waiting.answer

    def _seconds_waiting(self) -> float:
        """How long the pieces of all requests will take, at the rate of the last rounds."""
        pieces = sum(len(request.pieces) - len(request.found) for request in self._requests)
        return pieces * self._seconds_per_piece

    def warm_up(self) -> None:
        """Have programs compiled beside the work, from now on; for short sentences first."""
        self._to_compile.extend(self.translator.to_compile())
        threading.Thread(target=self._compile, name="compiler", daemon=True).start()

    def _checked(self, text: str, target: str = "", source: str = "") -> _Request:
        refuse_more(len(text), LONGEST, "characters are too many for the page")
        try:
            target = choose_target(self.translator.tokenizer, source, target or self.about.target)
        except UserError as error:
            raise RefusedError(400, str(error)) from None
        text = " ".join(well_formed(text).split())
        pieces = [part for part in self.translator.pieces(text) if part.strip()]
        refuse_more(len(pieces), PIECES, TOO_MUCH)
        return _Request(target, pieces, time.monotonic(), shows_experts=True, source=source)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._requests)
                everyone = [r for r in self._requests if not r.answer.cancelled()]
                self._requests = deque(everyone)
            if not everyone:
                continue
            done = self._round(everyone) if self._pool is None else self._steps(everyone)
            with self._changed:
                for program in self.translator.missed - self._missed:
                    self._missed.add(program)
                    self._to_compile.append(
                        functools.partial(self.translator.search_program, *program)
                    )
                for request in done:
                    self._requests.remove(request)
                self._changed.notify_all()

    def _compile(self) -> None:
        """One program after the other, without end; one that fails is done without."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._to_compile)
            try:
                self._to_compile[0]()
            except Exception as error:
                log.error("a program cannot be compiled", exc_info=error)
            with self._changed:
                self._to_compile.popleft()
                if not self._to_compile and self._ready_at is None:
                    self._ready_at = time.monotonic()

    def _round(self, everyone: list[_Request]) -> list[_Request]:
        """Translate one batch of pieces; returns the requests that are answered by it."""
        source, target = everyone[0].source, everyone[0].target
        alike = [each for each in everyone if (each.source, each.target) == (source, target)]
        turn = _TURN if len(alike) > 1 else self.translator.full_rows
        chosen: list[tuple[_Request, list[str]]] = []
        room = self.translator.full_rows
        for request in alike:
            pieces = request.left[: min(turn, room)]
            chosen.append((request, pieces))
            room -= len(pieces)
        begin = time.monotonic()
        try:
            texts = [piece for _, pieces in chosen for piece in pieces]
            found = iter(self.translator.translate(texts, target, source=source))
            for request, pieces in chosen:
                mine = zip(pieces, itertools.islice(found, len(pieces)), strict=True)
                for piece, hypotheses in mine:
                    request.add(hypotheses, self._shown(request, piece, hypotheses))
        except Exception as error:
            for request, _ in chosen:
                request.settle(error)
            return [request for request, _ in chosen]
        self._note_rate(time.monotonic() - begin, sum(len(pieces) for _, pieces in chosen))
        done = [request for request in alike if self._finish(request, begin)]
        # A request that had a turn and is not done queues behind the others.
        with self._changed:
            for request, pieces in chosen:
                if pieces and request not in done and len(alike) > 1:
                    self._requests.remove(request)
                    self._requests.append(request)
        return done

    def _steps(self, everyone: list[_Request]) -> list[_Request]:
        """Let pieces join the search, a few of each request in turn, and take some of its steps."""
        begin = time.monotonic()
        self._since = self._since if len(self._pool) else begin
        try:
            self._pool.drop(lambda key: key[0].answer.done())
            self._let_in(everyone)
            finished = 0
            for (request, number), found in self._pool.run():
                request.ahead[number] = self.translator.hypotheses(found)
                finished += 1
            for request in everyone:
                while len(request.found) in request.ahead:
                    hypotheses = request.ahead.pop(len(request.found))
                    piece = request.left[0]
                    request.add(hypotheses, self._shown(request, piece, hypotheses))
        except Exception as error:
            self._pool.drop(lambda key: True)
            for request in everyone:
                request.settle(error)
            return everyone
        if finished:
            now = time.monotonic()
            self._note_rate(now - self._since, finished)
            self._since = now
        return [request for request in everyone if self._finish(request, begin)]

    def _let_in(self, everyone: list[_Request]) -> None:
        """Have pieces wait for the search, as many as it can take and once more."""
        full, translator = self.translator.full_rows, self.translator
        turn = _TURN if len(everyone) > 1 else full
        some = [request for request in everyone if request.searched < len(request.pieces)]
        while some and len(self._pool) < 2 * full:
            for request in some:
                pieces = request.pieces[request.searched :][:turn]
                for number, piece in enumerate(pieces, request.searched):
                    jobs = translator.jobs([piece], request.target, request.source)
                    for _, ids, length in jobs:
                        most = translator.config.search(length).max_length
                        forced = translator.tokenizer.forced(request.target)
                        self._pool.add((request, number), ids, length, most, *forced)
                    if not jobs:
                        request.ahead[number] = [Hypothesis("", 0.0)]
                request.searched += len(pieces)
            some = [request for request in some if request.searched < len(request.pieces)]

    def _note_rate(self, seconds: float, pieces: int) -> None:
        """Average the time of a piece over some rounds: a single one may be of long pieces."""
        if pieces:
            this, before = seconds / pieces, self._seconds_per_piece
            self._seconds_per_piece = this if before == float("inf") else 0.8 * before + 0.2 * this

    def _shown(self, request: _Request, piece: str, hypotheses: list[Hypothesis]) -> dict[str, Any]:
        """A piece with the experts of its tokens; nothing for what translates to nothing."""
        if not request.shows_experts or not hypotheses[0].tokens:
            return {}
        best = hypotheses[0]
        found = routes(self.translator, piece, best, request.target, request.source)
        return {"text": piece.strip(), **found}

    def _finish(self, request: _Request, now: float) -> bool:
        """Answer a request that is done or out of time."""
        if request.answer.cancelled():
            return True
        if not request.left:
            request.settle(self._answer(request))
            return True
        seconds = SECONDS * -(-len(request.pieces) // PIECES)
        if self._ready_at is not None and now - max(request.arrived, self._ready_at) > seconds:
            limit = f"this text took more than {seconds:.0f} s, and was given up"
            request.settle(RefusedError(503, limit))
            return True
        return False

    def _answer(self, request: _Request) -> Any:
        if not request.shows_experts:
            return [hypotheses for hypotheses, _ in request.found]
        said = [hypotheses for hypotheses, _ in request.found if hypotheses[0].tokens]
        whole = joined(said, request.target)
        return {
            "target": request.target,
            "translation": whole[0].text,
            "score": whole[0].score,
            "alternatives": [{"text": h.text, "score": h.score} for h in whole],
            "parts": [shown for _, shown in request.found if shown],
            "seconds": round(time.monotonic() - request.arrived, 3),
        }
