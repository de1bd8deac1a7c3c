"""`gshard serve`: LibreTranslate's API, and a web page to try a model."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gshard.commands import options
from gshard.commands.show import console
from gshard.errors import UserError, one_of

if TYPE_CHECKING:
    from gshard.mt.serving.ray_serve import RayServer
    from gshard.mt.serving.settings import Settings
    from gshard.mt.serving.workers import Served


_Keys = Annotated[
    Path | None, typer.Option(help="TOML file of keys with limits", show_default="the page's token")
]
_Proxies = Annotated[
    str, typer.Option(help="addresses of proxies whose X-Forwarded headers are trusted")
]
_Workers = Annotated[int, typer.Option(help="processes, each with a copy of the model", min=1)]
_On = Annotated[
    str, typer.Option(help="ray: --workers replicas on a Ray cluster", show_default="this machine")
]


def serve(
    run: options.Run,
    host: Annotated[str, typer.Option(help="address to listen on; 0.0.0.0 is all")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on; 0 takes any free one")] = 8000,
    keys: _Keys = None,
    is_open: Annotated[bool, typer.Option("--open", help="ask for no key")] = False,
    req_limit: Annotated[
        int, typer.Option(help="texts per minute for all clients without a key; 0 is no limit")
    ] = 0,
    char_limit: Annotated[int, typer.Option(help="characters in one request, at most")] = 5_000,
    batch_limit: Annotated[int, typer.Option(help="texts in one request, at most")] = 100,
    tls_cert: Annotated[Path | None, typer.Option(help="certificate, PEM")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="its key, PEM")] = None,
    proxies: _Proxies = "",
    cors: Annotated[str, typer.Option(help="origin whose pages may use the API, or *")] = "",
    logs: Annotated[str, typer.Option(help="none, text or json: a line for each request")] = "none",
    workers: _Workers = 1,
    on: _On = "",
    beam: options.Beam = 4,
    alternatives: Annotated[int, typer.Option(help="translations to show")] = 4,
    alpha: options.Alpha = 0.6,
    checkpoint: options.Checkpoint = "best",
    rows: options.Rows = 32,
    devices: options.Devices = 0,
    engine: options.Engine = "auto",
    weights: options.Weights = "",
    threads: options.Threads = 0,
) -> None:
    """Serve a model: LibreTranslate's API, and a page with a translation and its experts."""
    from gshard.mt.decoding.engines import engine_of
    from gshard.mt.decoding.texts import TranslateConfig
    from gshard.mt.run import Run as OpenedRun
    from gshard.mt.serving.settings import LOGS, Settings, read_keys
    from gshard.mt.serving.workers import Served

    logged = one_of("--logs", logs, LOGS)
    if on:
        one_of("--on", on, ("ray",))
    if keys is not None and is_open:
        raise UserError("--keys asks for keys and --open for none; give one of them")
    if req_limit and not is_open:
        raise UserError("--req-limit is for --open; keys have their limits in the file of --keys")
    settings = Settings(
        host, port, tls_cert, tls_key, read_keys(keys) if keys else (), is_open, req_limit,
        char_limit, batch_limit, proxies, cors, logged,
    )  # fmt: skip
    opened = OpenedRun.open(run)
    longest = max(opened.config.batch.source_length, 16)
    config = TranslateConfig(beam, min(alternatives, beam), alpha, rows, longest)
    _run(
        Served(run, checkpoint, config, devices, engine_of(engine, weights, threads)),
        settings,
        workers,
        opened.name,
        on,
    )


def _run(served: Served, settings: Settings, workers: int, name: str, on: str) -> None:
    """Serve until Ctrl-C or SIGTERM."""

    from gshard.mt.serving.server import Server, listen
    from gshard.mt.serving.workers import Workers

    server: Server | Workers | RayServer
    if on:
        from gshard.mt.serving.ray_serve import RayServer  # which needs its package

        with console.status(f"starting {workers} replicas of {name}"):
            server = RayServer.start(served, settings, workers)
    elif workers > 1:
        server = Workers(served, settings, workers)
    else:
        listening = listen(settings)
        with console.status(f"loading {name}"):
            service, detector = served.open()
        server = Server(service, settings, detector, listening)
    console.print(f"{name} is at {server.address} (Ctrl-C ends it)", soft_wrap=True)
    # SIGTERM ends it as Ctrl-C does: Uvicorn lets the answers finish and raises the signal again.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    with contextlib.suppress(KeyboardInterrupt):
        server.run()
    console.print("ended")
    if workers > 1 or on:
        return
    # A thread may be compiling, which cannot be interrupted and would crash during a normal exit;
    # there is nothing left to save.
    sys.stdout.flush()
    os._exit(0)
