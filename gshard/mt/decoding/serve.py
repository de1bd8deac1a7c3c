"""A local web page to type a sentence and see its translation and the experts behind it.

The page is one file without a word from outside; the server listens on this machine only and
speaks JSON. One request at a time has the model.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any

from gshard.mt.decoding.token_experts import routes, routes_program
from gshard.mt.decoding.translator import Translator, choose_target, joined, well_formed
from gshard.mt.errors import UserError

HOST = "127.0.0.1"
LONGEST = 5_000  # characters of a text
_BODY = 16 * LONGEST  # bytes of a request: every character may be an escape
_READING = 20.0  # seconds that a request may take to arrive


class RefusedError(Exception):
    """A request that is answered with an error of the client's making."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class About:
    """What the page says about the model."""

    name: str
    step: int
    targets: tuple[str, ...]
    target: str  # the usual one
    experts: int
    encoder_layers: int
    decoder_layers: int
    weights: int
    longest: int = LONGEST


class Service:
    """The answers, apart from how they travel."""

    def __init__(self, translator: Translator, name: str = "model", step: int = 0):
        self._translator = translator
        self._lock = threading.Lock()
        tokenizer, dims = translator.tokenizer, translator.model_config
        targets = tuple(sorted({task.target for task in tokenizer.tasks}))
        usual = "en" if "en" in targets else targets[0]
        self.about = About(
            name,
            step,
            targets,
            usual,
            dims.experts,
            dims.encoder_layers,
            dims.decoder_layers,
            translator.weights,
        )

    def warm_up(self) -> None:
        """Compile the programs for every length, short ones first, so that nobody waits for them.

        Between two programs the model is free.
        """
        rows = self._translator.strategy.devices
        for length in self._translator.config.lengths:
            with self._lock:
                self._translator.search_program(rows, length)
            with self._lock:
                routes_program(self._translator, length)

    def translate(self, request: Any) -> dict[str, Any]:
        """The translation of a request's text, its alternatives, and every token's experts."""
        if not isinstance(request, dict):
            raise RefusedError(400, 'the request is no JSON object such as {"text": "..."}')
        text, target = request.get("text"), request.get("target") or self.about.target
        if not isinstance(text, str) or not isinstance(target, str):
            raise RefusedError(400, "`text` and `target` are strings")
        if len(text) > LONGEST:
            raise RefusedError(
                413, f"{len(text):,} characters are too many for the page; {LONGEST:,} are allowed"
            )
        try:
            target = choose_target(self._translator.tokenizer, target=target)
        except UserError as error:
            raise RefusedError(400, str(error)) from None
        text = " ".join(well_formed(text).split())
        begin = time.perf_counter()
        with self._lock:
            parts = [part for part in self._translator.pieces(text, target) if part.strip()]
            found = self._translator.translate(parts, target)
            answers = []
            for part, hypotheses in zip(parts, found, strict=True):
                if hypotheses[0].tokens:
                    shown = routes(self._translator, part, hypotheses[0], target)
                    answers.append({"text": part.strip(), **asdict(shown)})
        whole = joined([hypotheses for hypotheses in found if hypotheses[0].tokens], target)
        return {
            "target": target,
            "translation": whole[0].text,
            "score": whole[0].score,
            "alternatives": [{"text": h.text, "score": h.score} for h in whole],
            "parts": answers,
            "seconds": round(time.perf_counter() - begin, 3),
        }


class Server(ThreadingHTTPServer):
    """The web server of one service; `port` 0 takes any that is free."""

    daemon_threads = True

    def __init__(self, service: Service, port: int = 8000):
        self.service = service
        self.page = resources.files("gshard.mt.decoding").joinpath("serve.html").read_bytes()
        self.policy = _policy(self.page.decode())
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise UserError(f"port {port} cannot be used: {why}; --port names another") from None

    @property
    def address(self) -> str:
        """Where a browser finds it."""
        return f"http://{HOST}:{self.server_address[1]}/"


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version = "gshard"
    sys_version = ""
    timeout = _READING

    def do_GET(self) -> None:
        """The page, or what the model is."""
        path = self.path.partition("?")[0]
        if path == "/":
            self._answer(lambda: self.server.page, "text/html; charset=utf-8")
        elif path == "/model":
            self._answer(lambda: asdict(self.server.service.about))
        elif path == "/favicon.ico":
            self._send(204, b"", "image/x-icon")
        else:
            self._answer(lambda: _refuse_path(path, "POST"))

    def do_POST(self) -> None:
        """A translation."""
        path = self.path.partition("?")[0]
        if path == "/translate":
            self._answer(lambda: self.server.service.translate(self._request()))
        else:
            self.close_connection = True  # what was sent is not read
            self._answer(lambda: _refuse_path(path, "GET"))

    def _other_method(self) -> None:
        self.close_connection = True
        self._answer(lambda: _refuse_path("/translate", "GET, POST"))

    do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_HEAD = do_TRACE = _other_method  # noqa: N815

    def _request(self) -> Any:
        """The JSON that was sent. It must say that it is: no form on another site can."""
        try:
            size = int(self.headers.get("Content-Length", ""))
        except ValueError:
            self.close_connection = True
            raise RefusedError(411, "the request does not say how long it is") from None
        if not 0 <= size <= _BODY:
            self.close_connection = True
            raise RefusedError(413, f"{size:,} bytes are too many; {_BODY:,} are allowed")
        body = self.rfile.read(size)
        kind = self.headers.get_content_type()
        if kind != "application/json":
            raise RefusedError(415, f"the request is {kind}, not application/json")
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RefusedError(400, f"the request is no JSON: {error}") from None

    def _answer(self, answer: Callable[[], Any], kind: str = "application/json") -> None:
        """Send what `answer` returns, or the error it raises, as JSON."""
        status, value = 200, None
        try:
            self._check_host()
            value = answer()
        except RefusedError as error:
            status, value = error.status, {"error": str(error)}
        except TimeoutError:
            self.close_connection = True
            status, value = 408, {"error": "the request did not arrive in time"}
        except Exception:
            traceback.print_exc(file=sys.stderr)
            status, value = 500, {"error": "something went wrong here; the terminal says what"}
        if not isinstance(value, bytes):
            value, kind = json.dumps(value, allow_nan=False).encode(), "application/json"
        self._send(status, value, kind)

    def _check_host(self) -> None:
        """Refuse names that others could point at this machine."""
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if host not in (HOST, "localhost"):
            raise RefusedError(403, f"this server answers as {self.server.address} only")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Content-Security-Policy": self.server.policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }
        if status == 405:
            headers["Allow"] = "GET, POST"
        if self.close_connection:
            headers["Connection"] = "close"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the library itself refuses, as JSON too."""
        self.close_connection = True
        refusal = {"error": message or self.responses.get(code, ("refused",))[0]}
        self._send(code, json.dumps(refusal).encode(), "application/json")

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a calm terminal."""


def _refuse_path(path: str, methods: str) -> Any:
    known = {"/": "GET", "/model": "GET", "/translate": "POST"}
    if path in known:
        raise RefusedError(405, f"{path} takes {known[path]}")
    raise RefusedError(404, f"there is nothing at {path[:100]}; /translate takes POST")


def _policy(page: str) -> str:
    """A content security policy under which only the page's own script runs."""
    sources = {"script": [], "style": []}  # type: dict[str, list[str]]
    for tag, found in sources.items():
        for text in re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL):
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            found.append(f"'sha256-{digest}'")
    rules = [f"{tag}-src {' '.join(found)}" for tag, found in sources.items()]
    return "; ".join(
        ["default-src 'none'", "connect-src 'self'", *rules, "base-uri 'none'",
         "form-action 'none'", "frame-ancestors 'none'"]
    )  # fmt: skip
