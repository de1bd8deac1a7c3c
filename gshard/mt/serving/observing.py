"""What a server tells its operators: lines for requests and errors, and Prometheus' metrics.

No text of a request is ever logged.
"""

from __future__ import annotations

import functools
import json
import logging
import sys
import threading
import time
from datetime import UTC, datetime
from typing import Any

import prometheus_client as prometheus
from prometheus_client import multiprocess, values
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gshard.mt.atomic import printable
from gshard.mt.serving.service import Service, log
from gshard.mt.serving.settings import Logs

_LOGGERS = (log.name, "asyncio", "py.warnings")  # of errors and warnings while it serves
_NOTES = "gshard.notes"  # in a scope: what the routes say about a request
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0)


def note(scope: Scope, **notes: Any) -> None:
    """Add to what is logged about a request."""
    scope.setdefault(_NOTES, {}).update(notes)


class Metrics:
    """The metrics of one server, or of one of its workers."""

    def __init__(self, service: Service):
        self._registry = prometheus.CollectorRegistry()
        own: dict[str, Any] = {"registry": self._registry}
        counter: Any = functools.partial(prometheus.Counter, **own)
        gauge: Any = functools.partial(prometheus.Gauge, multiprocess_mode="livesum", **own)
        labels, title = ["route", "status"], "Time to the end of the answer"
        self.requests = counter("gshard_requests", "Requests by route and status", labels)
        self.seconds = prometheus.Histogram(
            "gshard_request_seconds", title, ["route"], buckets=_SECONDS, **own
        )
        self.texts = counter("gshard_texts", "Texts that were to be translated, by key", ["key"])
        self.characters = counter("gshard_characters", "Characters of these texts, by key", ["key"])
        self.waiting = gauge("gshard_waiting", "Requests that wait or are in work")
        self.compiling = gauge("gshard_compiling", "Programs to be compiled")
        compiled = "Whether the first programs are compiled"
        self.ready = gauge("gshard_ready", compiled, multiprocess_mode="livemin")
        self._service = service

    def text(self) -> bytes:
        """In Prometheus' format; with several workers, those of all."""
        health = self._service.health
        self.waiting.set(health["waiting"])
        self.compiling.set(health["compiling"])
        self.ready.set(health["status"] == "ready")
        registry = self._registry
        if values.ValueClass is not values.MutexValue:  # the workers' files, in a shared folder
            registry = prometheus.CollectorRegistry()
            multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]  # it has no types
        return prometheus.generate_latest(registry)


class Observed:
    """Logs and counts each request when its answer is sent."""

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: frozenset[str]):
        self._app, self._metrics, self._routes = app, metrics, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, status = time.monotonic(), 499  # the client has left

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, observed)
        finally:
            self._observe(scope, status, time.monotonic() - begin)

    def _observe(self, scope: Scope, status: int, seconds: float) -> None:
        route = scope["path"] if scope["path"] in self._routes else "other"
        notes = scope.get(_NOTES, {})
        self._metrics.requests.labels(route, str(status)).inc()
        self._metrics.seconds.labels(route).observe(seconds)
        if "texts" in notes:
            self._metrics.texts.labels(notes["key"]).inc(notes["texts"])
            self._metrics.characters.labels(notes["key"]).inc(notes["characters"])
        client = (scope.get("client") or ("",))[0]
        log.info(
            "request",
            extra={
                "fields": {
                    "method": scope["method"], "route": route, "status": status,
                    "seconds": round(seconds, 4), "client": client, **notes,
                }
            },
        )  # fmt: skip


class _Json(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        said = {"time": at, "level": record.levelname.lower(), "event": record.getMessage()}
        said |= getattr(record, "fields", {})
        if record.exc_info:
            said["error"] = self.formatException(record.exc_info)
        return json.dumps(said)


class _Text(logging.Formatter):
    """The same for people."""

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        said = " ".join(f"{name}={printable(str(value))}" for name, value in fields.items())
        error = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        return f"{self.formatTime(record)} {record.getMessage()} {said}".rstrip() + error


def start_logs(kind: Logs) -> None:
    """Write to standard error from now on: requests unless there are to be none, and errors."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if kind == "json" else _Text())
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.WARNING)
    if kind != "none":
        log.setLevel(logging.INFO)
    if kind == "json":  # then all of it is JSON
        logging.captureWarnings(True)
        threading.excepthook = lambda failed: log.error("a thread", exc_info=failed.exc_value)
