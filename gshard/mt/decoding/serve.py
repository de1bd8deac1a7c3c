"""A local web page to type a sentence and see its translation and the experts behind it.

The page is one file without a word from outside. Starlette and Uvicorn carry it: connections cost
no threads, end by themselves, and with bodies that are not read. The server listens on this
machine only, answers to its own name only, and to those who know the token in its address.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import re
import secrets
import socket
import sys
import traceback
from dataclasses import asdict
from importlib import resources
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gshard.mt.decoding.connections import Connection
from gshard.mt.decoding.service import LONGEST, RefusedError, Service
from gshard.mt.errors import UserError

HOST = "127.0.0.1"
_BODY = 16 * LONGEST  # bytes of a request: every character may be an escape
_READING = 20.0  # seconds that a request may take to arrive
_BACKLOG = 64  # connections that are taken at once, before any of them is looked at
_LEAVING = 0.2  # seconds between two looks at whether a client has left


class Server:
    """The web server of one service; `port` 0 takes any that is free."""

    def __init__(self, service: Service, port: int = 8000):
        self.token = secrets.token_urlsafe(16)
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((HOST, port))
        except (OSError, OverflowError) as error:
            self._socket.close()
            why = getattr(error, "strerror", None) or error
            raise UserError(f"port {port} cannot be used: {why}; --port names another") from None
        self._socket.listen(_BACKLOG)
        self.port = self._socket.getsockname()[1]
        config = uvicorn.Config(
            _application(service, self.token),
            http=Connection,
            backlog=_BACKLOG,
            ws="none",
            lifespan="off",
            log_level="critical",
            server_header=False,
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=16_384,
        )
        self._server = uvicorn.Server(config)

    @property
    def address(self) -> str:
        """Where a browser finds it; whoever does not know the token is sent away."""
        return f"http://{HOST}:{self.port}/{self.token}/"

    def run(self) -> None:
        """Answer until `stop` or a signal."""
        self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        """Let `run` return."""
        self._server.should_exit = True


def _application(service: Service, token: str) -> Starlette:
    files = resources.files("gshard.mt.decoding")
    html, script = (files.joinpath(f"serve.{kind}").read_text("utf-8") for kind in ("html", "js"))
    page = html.replace("/* serve.js */", script)

    async def show(request: Request) -> Response:
        return Response(page, media_type="text/html")

    async def model(request: Request) -> Response:
        return JSONResponse(asdict(service.about))

    async def health(request: Request) -> Response:
        return JSONResponse(service.health)

    async def icon(request: Request) -> Response:
        return Response(status_code=204)

    async def translate(request: Request) -> Response:
        asked = await _json(request)
        answer = asyncio.wrap_future(await asyncio.to_thread(service.submit, asked))
        while not (await asyncio.wait([answer], timeout=_LEAVING))[0]:
            if await request.is_disconnected():
                answer.cancel()  # nobody waits for it any more
                raise ClientDisconnect
        return JSONResponse(answer.result())

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/favicon.ico", icon),
            Route(f"/{token}/", show),
            Route(f"/{token}/model", model),
            Route(f"/{token}/translate", translate, methods=["POST"]),
        ],
        middleware=[Middleware(_Guard, policy=_policy(page))],
        exception_handlers={
            RefusedError: _refused,
            HTTPException: _not_found,
            ClientDisconnect: lambda request, error: Response(status_code=499),
            Exception: _failed,
        },
    )


async def _json(request: Request) -> Any:
    """The JSON that was sent. It must say that it is: no form on another site can."""
    kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RefusedError(415, f"the request is {kind or 'of no type'}, not application/json")
    body = b""
    try:
        async with asyncio.timeout(_READING):
            async for part in request.stream():
                body += part
                if len(body) > _BODY:
                    raise RefusedError(413, f"a request has {_BODY:,} bytes at most")
    except TimeoutError:
        raise RefusedError(408, "the request did not arrive in time") from None
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"the request is no JSON: {error}") from None


class _Guard:
    """Refuses names that others could point at this machine, and adds the page's policy."""

    def __init__(self, app: ASGIApp, policy: str):
        self._app = app
        self._headers = {
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(k.lower().encode(), v.encode()) for k, v in self._headers.items()]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        app = self._app
        host = Headers(scope=scope).get("Host", "")
        if (host.rpartition(":")[0] or host) not in (HOST, "localhost"):
            error = {"error": f"this server answers as {HOST} only"}
            app = JSONResponse(error, 403, headers={"Connection": "close"})
        with contextlib.suppress(ClientDisconnect):
            await app(scope, receive, guarded)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    # What is left of a body is not read, so that the connection cannot be used again.
    headers = {"Connection": "close", **({"Retry-After": "5"} if error.status == 503 else {})}
    return JSONResponse({"error": str(error)}, error.status, headers)


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    why = f"there is nothing at {request.url.path[:100]} (the address has a token)"
    if error.status_code == 405:
        why = f"{request.method[:20]} is not what this takes"
    headers = {**(error.headers or {}), "Connection": "close"}
    return JSONResponse({"error": why}, error.status_code, headers)


async def _failed(request: Request, error: Exception) -> Response:
    traceback.print_exception(error, file=sys.stderr)
    return JSONResponse({"error": "something went wrong here; the terminal says what"}, 500)


def _policy(page: str) -> str:
    """A content security policy under which only the page's own script runs."""
    sources: dict[str, list[str]] = {"script": [], "style": []}
    for tag, found in sources.items():
        for text in re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL):
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            found.append(f"'sha256-{digest}'")
    rules = [f"{tag}-src {' '.join(found)}" for tag, found in sources.items()]
    return "; ".join(
        ["default-src 'none'", "connect-src 'self'", *rules, "base-uri 'none'",
         "form-action 'none'", "frame-ancestors 'none'"]
    )  # fmt: skip
