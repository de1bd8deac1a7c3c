"""The server: LibreTranslate's routes, and a page that shows a translation with its experts.

Starlette and Uvicorn do the work: connections take no threads, end by themselves, and with bodies
that are not read. Unless told otherwise, the server listens on this machine only, answers to its
own name only, and to those who know the token in the page's address. The page is one file without
anything from outside.

Idle connections are closed: Uvicorn limits the time between two requests, and neither that of a
request's head nor that in which a client takes its answer. Here a connection has as long for both.
And there are fewer connections than descriptors: one too many ends the one that has let the server
wait for longest.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import itertools
import re
import resource
import secrets
import shutil
import socket
import tempfile
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from gshard.errors import UserError
from gshard.mt.decoding.detect import Detector
from gshard.mt.serving import openapi, requests
from gshard.mt.serving.api import Api, always
from gshard.mt.serving.observing import Observed, start_logs
from gshard.mt.serving.service import LONGEST, SECONDS, RefusedError, Service, log
from gshard.mt.serving.settings import LOCAL, TOKEN, ApiKeys, Key, Settings, is_local

IDLE = 10.0  # seconds from a connection's begin, or its last answer, to its next request's head
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

    # asyncio's base class has any transport; Uvicorn's own override has TCP's, as here.
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
        self._timer = self.loop.call_later(IDLE, self.transport.abort)

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


_BACKLOG = 1024  # connections that are taken at once, before any of them is looked at
_PAGE_BODY = 16 * LONGEST  # bytes of the page's request: every character may be an escape
_LAST_PORT = 65_535


class Server:
    """The web server of one service; port 0 takes any that is free."""

    def __init__(
        self,
        service: Service,
        settings: Settings | None = None,
        detector: Detector | None = None,
        listening: socket.socket | None = None,
    ):
        self.settings = settings or Settings()
        self.socket = listening or listen(self.settings)
        self.access = Access.of(self.settings)
        app = application(service, self.settings, self.access, detector)
        self._server = uvicorn.Server(configured(app, self.settings))

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.socket.getsockname()[1])

    @property
    def token(self) -> str:
        """What the page's address has in it."""
        return self.access.token

    @property
    def address(self) -> str:
        """Where a browser finds the page; whoever does not know the token is sent away."""
        return self.access.address(self.settings, self.port)

    def run(self) -> None:
        """Answer until `stop` or a signal; requests that are being answered are finished."""
        try:
            self._server.run(sockets=[self.socket])
        finally:
            self.access.close()

    def stop(self) -> None:
        """Let `run` return."""
        self._server.should_exit = True


@dataclass(frozen=True)
class Access:
    """The token of the page's address, the keys, and the folder of translated files.

    They are the same in all workers of a server.
    """

    token: str
    keys: ApiKeys
    files: Path

    @staticmethod
    def of(settings: Settings, token: str = "", *, shared: bool = False) -> Access:
        """New ones, or those of a known token. Without other keys, it is the key of the API.

        `shared` ones are for several processes.
        """
        token = token or secrets.token_urlsafe(16)
        keys = settings.keys or (() if settings.is_open else (Key(TOKEN, token),))
        return Access(
            "page" if settings.is_open else token,
            ApiKeys(keys, is_open=settings.is_open, per_minute=settings.per_minute, shared=shared),
            Path(tempfile.gettempdir()) / f"gshard-files-{secrets.token_hex(16)}",
        )

    def close(self) -> None:
        """Remove the translated files."""
        shutil.rmtree(self.files, ignore_errors=True)

    def address(self, settings: Settings, port: int) -> str:
        """The page's address; a server on all addresses has the name of its machine."""
        host = socket.gethostname() if settings.host in ("0.0.0.0", "::") else settings.host
        host = f"[{host}]" if ":" in host else host
        return f"{settings.scheme}://{host}:{port}/{self.token}/"


def listen(settings: Settings) -> socket.socket:
    """The socket of a server, bound and listening."""
    port = settings.port
    if not 0 <= port <= _LAST_PORT:
        raise UserError(f"port {port} cannot be used: ports are 0 to {_LAST_PORT:,}")
    try:
        kind, _, _, _, address = socket.getaddrinfo(
            settings.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with contextlib.ExitStack() as unless_it_listens:
            made = unless_it_listens.enter_context(socket.socket(kind))
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
            made.listen(_BACKLOG)
            unless_it_listens.pop_all()
    except (OSError, OverflowError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"--host {settings.host!r} --port {port} cannot be used: {why}") from None
    return made


def configured(app: Any, settings: Settings, **more: Any) -> uvicorn.Config:
    """Uvicorn's settings: short heads, no server header, TLS, and time to finish on SIGTERM."""
    return uvicorn.Config(
        app,
        http=Connection,
        backlog=_BACKLOG,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(SECONDS),
        h11_max_incomplete_event_size=16_384,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        proxy_headers=bool(settings.proxies),
        forwarded_allow_ips=settings.proxies or None,
        **more,
    )


def application(
    service: Service, settings: Settings, access: Access, detector: Detector | None = None
) -> Starlette:
    """The routes of the page and of the API, behind what guards and observes them."""
    start_logs(settings.logs)
    api = Api(service, settings, access.keys, access.files, detector)
    page, pages = _pages(service, access.token)
    if settings.is_open:  # the bare address leads to the page, where no key is asked for
        pages.append(Route("/", always(lambda: RedirectResponse(f"{access.token}/"))))
    document, docs = openapi.document(service.about), openapi.page(service.about)
    routes = [
        *api.routes,
        *pages,
        Route("/openapi.json", always(lambda: JSONResponse(document))),
        Route("/docs", always(lambda: Response(docs, media_type="text/html"))),
    ]
    known = frozenset(route.path for route in routes) - {route.path for route in pages}
    cors = Middleware(
        CORSMiddleware,
        allow_origins=[settings.cors],
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        allow_private_network=True,  # the server may be in another network than the page
        expose_headers=["Retry-After"],
    )
    return Starlette(
        routes=routes,
        middleware=[
            Middleware(Observed, metrics=api.metrics, routes=known),
            *([cors] if settings.cors else []),
            Middleware(_PageGuard, policy=_policy(page + docs), checks_names=settings.checks_names),
        ],
        exception_handlers={
            RefusedError: _refused,
            HTTPException: _not_found,
            ClientDisconnect: lambda request, error: Response(status_code=499),
            Exception: _failed,
        },
    )


def _pages(service: Service, token: str) -> tuple[str, list[Route]]:
    """The page, and its routes."""
    files = resources.files("gshard.mt.serving")
    html, script = (files.joinpath(f"page.{kind}").read_text("utf-8") for kind in ("html", "js"))
    page = html.replace("/* page.js */", script)

    async def translate(request: Request) -> Response:
        given = await requests.read_object(request, _PAGE_BODY, (requests.JSON,))
        asked = requests.read(requests.PAGE, given)  # JSON: no form on another site can send it
        return JSONResponse(
            await requests.answered(request, await asyncio.to_thread(service.submit, asked))
        )

    return page, [
        Route("/favicon.ico", always(lambda: Response(status_code=204))),
        Route(f"/{token}/", always(lambda: Response(page, media_type="text/html"))),
        Route(f"/{token}/model", always(lambda: JSONResponse(asdict(service.about)))),
        Route(f"/{token}/translate", translate, methods=["POST"]),
    ]


class _PageGuard:
    """Refuses names that others could point at this machine, and adds the page's policy."""

    def __init__(self, app: ASGIApp, policy: str, checks_names: bool):
        self._app, self._checks_names = app, checks_names
        self._headers = {
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the start and the end of a server, where it tells of them
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(k.lower().encode(), v.encode()) for k, v in self._headers.items()]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        app = self._app
        host = Headers(scope=scope).get("Host", "")
        name = (host.rpartition(":")[0] or host).strip("[]")
        if self._checks_names and not is_local(name):
            error = {"error": f"this server answers as {LOCAL} only"}
            app = JSONResponse(error, 403, headers={"Connection": "close"})
        with contextlib.suppress(ClientDisconnect):
            await app(scope, receive, guarded)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    # What is left of a body is not read, so that the connection cannot be used again.
    headers = {"Connection": "close"}
    if error.retry_after:
        headers["Retry-After"] = str(error.retry_after)
    return JSONResponse({"error": str(error)}, error.status, headers)


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:100]
    why = f"there is nothing at {path} (the page's address has a token; /docs lists the routes)"
    if error.status_code == 405:
        why = f"{request.method[:20]} is not what this takes"
    headers = {**(error.headers or {}), "Connection": "close"}
    return JSONResponse({"error": why}, error.status_code, headers)


async def _failed(request: Request, error: Exception) -> Response:
    log.error("error", exc_info=error)
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
