"""Whether the memory of `gshard serve` stays flat while it answers requests of every kind.

    python -m benchmarks.serve_memory --minutes 60 [RELEASE]

Starts the server as its own process and sends it short and long texts, lists, forms, HTML, streams
of events, mistakes, and requests whose client leaves before the answer, in random order, languages
and lengths. Prints the server's resident memory once a minute, and at the end: at the start (the
server is ready), and the medians of the second sixth of the time (the first is the warm-up) and of
the last: requests in progress have memory too, which a median does not count. The exit status is 1
if it grew by over 2% between these, or a request was not answered as it should be; a server that is
too slow for its clients may refuse them (503), which is counted by itself. Without a release the
model is a small one that has learned nothing, on made-up text in three languages, both ways.
"""

from __future__ import annotations

import argparse
import collections
import http.client
import json
import random
import re
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.small_run import prepare, words
from gshard.mt.release.make import make_release
from gshard.mt.run import Run

LANGUAGES = ("de", "fr", "ru")
LIMIT = 5_000  # characters of a request, as the server has it by default
GROWTH = 0.02
SERVE = [sys.executable, "-m", "gshard.cli", "serve"]
JSON, FORM = "application/json", "application/x-www-form-urlencoded"


class RefusedError(Exception):
    """The server has too much to do."""


class Client:
    """Sends requests of all kinds to one server; each returns whether its answer was right."""

    def __init__(self, address: str, languages: tuple[str, ...], seed: int):
        found = urllib.parse.urlsplit(address)
        assert found.hostname
        assert found.port
        self._place = (found.hostname, found.port)
        self._page = found.path
        self._languages = languages
        self._random = random.Random(seed)
        self.kinds: tuple[Callable[[], bool], ...] = (
            self.text, self.text, self.text, self.batch, self.form, self.html, self.alternatives,
            self.detect, self.events, self.left_events, self.left_answer, self.left_body,
            self.unknown_language, self.unknown_field, self.no_json, self.too_long, self.not_found,
            self.wrong_method, self.page, self.pages,
        )  # fmt: skip

    def one(self) -> tuple[str, str]:
        """Send a request of a random kind: its name, and "right", "refused" or "wrong"."""
        kind = self._random.choice(self.kinds)
        try:
            return kind.__name__, "right" if kind() else "wrong"
        except RefusedError:
            return kind.__name__, "refused"
        except (OSError, http.client.HTTPException, ValueError, KeyError):
            return kind.__name__, "wrong"

    def is_ready(self) -> bool:
        """Whether the server has compiled what it needs."""
        try:
            return self._ask("GET", "/ready")[0] == 200
        except RefusedError:
            return False

    def _text(self, most: int = LIMIT) -> str:
        """Mostly a sentence, sometimes a page of them."""
        count = self._random.choice((1, 1, 1, 2, 5, 60))
        language = self._random.choice(self._languages)
        joint = self._random.choice((". ", "\n", "! "))
        drawn = (words(self._random.randrange(9973), language) for _ in range(count))
        return joint.join(drawn)[: self._random.randrange(1, most)]

    def _fields(self, **more: Any) -> dict[str, Any]:
        pair = [self._random.choice(self._languages), "en"]
        self._random.shuffle(pair)
        return {"q": self._text(), "source": pair[0], "target": pair[1], **more}

    def _ask(self, method: str, path: str, body: str = "", kind: str = JSON) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(*self._place, timeout=600)
        try:
            connection.request(method, path, body.encode(), {"Content-Type": kind})
            reply = connection.getresponse()
            answer = reply.read()
        finally:
            connection.close()
        if reply.status == 503 or b"event: error" in answer:
            raise RefusedError
        return reply.status, answer

    def _translated(self, fields: dict[str, Any]) -> Any:
        status, body = self._ask("POST", "/translate", json.dumps(fields))
        return json.loads(body)["translatedText"] if status == 200 else None

    def text(self) -> bool:
        """One text as JSON."""
        return isinstance(self._translated(self._fields()), str)

    def batch(self) -> bool:
        """Several texts."""
        texts = [self._text(200) for _ in range(self._random.randrange(1, 20))]
        found = self._translated(self._fields(q=texts))
        return found is not None and len(found) == len(texts)

    def form(self) -> bool:
        """One text as a form, of a language that has to be detected."""
        body = urllib.parse.urlencode(self._fields(source="auto", target="en"))
        return self._ask("POST", "/translate", body, FORM)[0] == 200

    def html(self) -> bool:
        """HTML with nested tags and references."""
        inner = "".join(f"<li>{n} &amp; <b>{self._text(80)}</b></li>" for n in range(5))
        found = self._translated(self._fields(q=f"<ul class='x'>{inner}</ul>", format="html"))
        return found is not None and found.count("<li>") == 5

    def alternatives(self) -> bool:
        """Other translations too."""
        status, body = self._ask("POST", "/translate", json.dumps(self._fields(alternatives=3)))
        return status == 200 and "alternatives" in json.loads(body)

    def detect(self) -> bool:
        """The language of a text."""
        return self._ask("POST", "/detect", json.dumps({"q": self._text()}))[0] == 200

    def events(self) -> bool:
        """A stream of events, read to its end."""
        query = urllib.parse.urlencode(self._fields(q=self._text(1000)))
        status, body = self._ask("GET", f"/translate/stream?{query}")
        return status == 200 and b"event: done" in body

    def left_events(self) -> bool:
        """A stream of events whose client leaves after the first bytes."""
        query = urllib.parse.urlencode(self._fields(q=self._text(1000)))
        head = f"GET /translate/stream?{query} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        with socket.create_connection(self._place, timeout=600) as connection:
            connection.sendall(head.encode())
            return connection.recv(12).startswith(b"HTTP/1.1 200")

    def left_answer(self) -> bool:
        """A text whose client leaves before the answer."""
        return self._leave(1.0)

    def left_body(self) -> bool:
        """A text of which half arrives."""
        return self._leave(0.5)

    def _leave(self, share: float) -> bool:
        body = json.dumps(self._fields()).encode()
        head = f"POST /translate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {JSON}\r\n"
        with socket.create_connection(self._place, timeout=600) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
            connection.sendall(body[: int(len(body) * share)])
            time.sleep(self._random.random() / 5)
        return True

    def _is_refused(self, status: int, body: str, path: str = "/translate") -> bool:
        found, answer = self._ask("POST", path, body)
        return found == status and "error" in json.loads(answer)

    def unknown_language(self) -> bool:
        """A language that the model has not."""
        return self._is_refused(400, json.dumps(self._fields(target="xx")))

    def unknown_field(self) -> bool:
        """A field that nobody knows."""
        return self._is_refused(400, json.dumps(self._fields(**{self._text(9): 1})))

    def no_json(self) -> bool:
        """A body that is cut."""
        return self._is_refused(400, json.dumps(self._fields())[:-5])

    def too_long(self) -> bool:
        """More characters than are allowed."""
        return self._is_refused(413, json.dumps(self._fields(q="a " * LIMIT)))

    def not_found(self) -> bool:
        """An address of nothing."""
        return self._ask("GET", f"/{urllib.parse.quote(self._text(20))}x")[0] == 404

    def wrong_method(self) -> bool:
        """An answer is asked for by GET."""
        return self._ask("GET", "/translate")[0] == 405

    def page(self) -> bool:
        """A translation with its experts, as the page asks for one."""
        body = json.dumps({"text": self._text(300), "target": "en"})
        return self._ask("POST", f"{self._page}translate", body)[0] == 200

    def pages(self) -> bool:
        """What is not translated."""
        paths = ("/languages", "/metrics", "/health", "/docs", "/openapi.json", self._page)
        return all(self._ask("GET", path)[0] == 200 for path in paths)


def resident(pid: int) -> float:
    """Megabytes that a process has in memory, on Linux."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def started(folder: Path, log: Path) -> tuple[subprocess.Popen[bytes], str]:
    """The server, once all programs of its start are compiled, and its address."""
    command = [*SERVE, str(folder), "--port", "0", "--open"]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    while not (found := re.search(r"is at (\S+)", log.read_text())):
        if process.poll() is not None:
            raise RuntimeError(log.read_text())
        time.sleep(0.2)
    client = Client(found[1], LANGUAGES, 0)
    while not client.is_ready():
        time.sleep(0.2)
    return process, found[1]


def asking(client: Client, pause: float, end: float, counts: collections.Counter[str]) -> None:
    """Ask until the time is over."""
    while time.monotonic() < end:
        begin = time.monotonic()
        kind, answer = client.one()
        counts[kind] += 1
        counts["answers"] += 1
        counts[answer] += 1
        if answer == "wrong":
            print(f"a request of kind {kind} was not answered as it should be", flush=True)
        time.sleep(max(0.0, pause - (time.monotonic() - begin)))


def watched(
    pid: int, address: str, languages: tuple[str, ...], minutes: float, rate: float, clients: int
) -> int:
    """Print the memory of a server that clients ask: the exit status."""
    counts: collections.Counter[str] = collections.Counter()
    begin = time.monotonic()
    end, sizes = begin + 60 * minutes, [(0.0, resident(pid))]
    threads = [
        threading.Thread(
            target=asking,
            args=(Client(address, languages, n), clients / rate, end, counts),
            daemon=True,
        )
        for n in range(clients)
    ]
    for thread in threads:
        thread.start()
    print(f"{'minutes':>8} {'requests':>9} {'refused':>8} {'wrong':>6} {'memory':>10}", flush=True)
    while (passed := time.monotonic() - begin) < 60 * minutes:
        time.sleep(min(60.0, 60 * minutes / 6, 60 * minutes - passed))
        sizes.append((time.monotonic() - begin, resident(pid)))
        print(
            f"{sizes[-1][0] / 60:8.1f} {counts['answers']:9,} {counts['refused']:8,} "
            f"{counts['wrong']:6,} {sizes[-1][1]:7.1f} MB",
            flush=True,
        )
    for thread in threads:
        thread.join(600)
    kinds = sorted(set(counts) - {"answers", "right", "refused", "wrong"})
    print(", ".join(f"{kind} {counts[kind]:,}" for kind in kinds))
    part = 60 * minutes / 6
    warm = statistics.median(size for seconds, size in sizes if 0.99 <= seconds / part < 2.01)
    last = statistics.median(size for seconds, size in sizes if seconds / part >= 4.99)
    grown = last / warm - 1
    print(
        f"resident memory: {sizes[0][1]:.1f} MB at the start, {warm:.1f} MB after "
        f"{minutes / 6:g} minutes, {last:.1f} MB at the end ({100 * grown:+.2f}%)"
    )
    return int(grown > GROWTH or counts["wrong"] > 0)


def main() -> None:
    """Print the table."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("release", type=Path, nargs="?")
    options.add_argument("--minutes", type=float, default=60.0)
    options.add_argument("--rate", type=float, default=5.0, help="requests a second, at most")
    options.add_argument("--clients", type=int, default=4)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = given.release
        if folder is None:
            both = ("vocabulary.directions=both", "vocabulary.source_size=600")
            prepare(Path(name), 1, 1, LANGUAGES, both)
            run = Run.open(Path(name) / "prepared")
            folder = make_release(run, Path(name) / "release", "untrained")
        known = Run.open(folder).tokenizer.config.languages
        server, address = started(folder, Path(name) / "log")
        status = watched(server.pid, address, known, given.minutes, given.rate, given.clients)
        server.send_signal(signal.SIGTERM)
        status = status or server.wait(600)
    sys.exit(status)


if __name__ == "__main__":
    main()
