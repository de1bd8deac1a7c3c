"""The server on a Ray cluster: replicas of one model behind Ray Serve's proxies.

The routes are those of `gshard serve`; Ray Serve starts replicas on the nodes that have room,
replaces those that fail, and lets them finish their answers before they end. `gshard serve RELEASE
--on ray` serves until it is interrupted. For Ray's own tools this module has an application builder
(`serve run gshard.mt.serving.ray_serve:app run=RELEASE workers=2`).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray import serve

from gshard.errors import UserError, one_of
from gshard.mt.decoding.engines import engine_of
from gshard.mt.decoding.texts import TranslateConfig
from gshard.mt.run import Run
from gshard.mt.serving.server import Access, application
from gshard.mt.serving.service import SECONDS, WAITING
from gshard.mt.serving.settings import Settings
from gshard.mt.serving.workers import Served

NAME = "gshard"  # of the application in Ray Serve
_LOOK = 0.1  # seconds between two looks at whether a replica is ready
_ARGUMENTS = {"run": str, "workers": int, "weights": str, "engine": str, "threads": int}


class Replica:
    """One process with a copy of the model; Ray Serve makes it from its arguments."""

    def __init__(self, served: Served, settings: Settings, token: str):
        self._access = Access.of(settings, token)
        self._service, detector = served.open()
        while self._service.health["status"] != "ready":
            time.sleep(_LOOK)
        self._app = application(self._service, settings, self._access, detector)

    def __del__(self) -> None:  # Ray Serve calls it when a replica ends
        self._access.close()

    def __serve_build_asgi_app__(self) -> Any:
        """The same application as without Ray."""
        return self._app

    def check_health(self) -> None:
        """An error once nothing is translated any more, after which Ray replaces this replica."""
        if not self._service.is_alive:
            raise RuntimeError("the thread that translates has ended")


def deployed(served: Served, settings: Settings, replicas: int, token: str) -> serve.Application:
    """The application of Ray Serve."""
    served = replace(served, run=served.run.resolve())  # replicas run in other folders
    made: Any = serve.deployment(
        name=NAME,
        num_replicas=replicas,
        max_ongoing_requests=WAITING,
        graceful_shutdown_timeout_s=SECONDS,
        ray_actor_options=resources(served),
    )
    return made(serve.ingress()(Replica)).bind(served, settings, token)


def resources(served: Served) -> dict[str, float]:
    """What a replica asks of a node: processors for its threads, and a GPU if there are any."""
    found = {"num_cpus": float(served.engine.threads or 1)}
    there: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]  # Ray has no types for it
    if served.engine.engine != "onnx" and there.get("GPU"):
        found["num_gpus"] = float(served.devices or 1)
    return found


@dataclass(frozen=True)
class RayServer:
    """`gshard serve --on ray`: the application on the cluster, until this process is asked to end.

    Every node that may run a replica must have the model's folder under the same path.
    """

    served: Served
    settings: Settings
    replicas: int
    access: Access

    @staticmethod
    def start(served: Served, settings: Settings, replicas: int) -> RayServer:
        """Start the replicas, and return when all of them are ready."""
        if settings.tls_cert is not None:
            raise UserError("--tls-cert and --tls-key are not for --on ray: put a proxy before it")
        if settings.port == 0:
            raise UserError("--on ray needs a port: --port 8000, say")
        connect()
        access = Access.of(settings)
        serve.start(http_options={"host": settings.host, "port": settings.port})
        if NAME in serve.status().applications:
            raise UserError(
                f"the cluster has an application {NAME!r} in Ray Serve already; "
                f"`serve.delete({NAME!r})` ends it"
            )
        try:
            made = deployed(served, settings, replicas, access.token)
            serve.run(made, name=NAME, route_prefix="/")
        except RuntimeError as error:
            serve.delete(NAME)
            raise UserError(f"the replicas did not start: {_last_line(error)}") from None
        return RayServer(served, settings, replicas, access)

    @property
    def address(self) -> str:
        """Where a browser finds the page."""
        return self.access.address(self.settings, self.settings.port)

    def run(self) -> None:
        """Wait for Ctrl-C or SIGTERM; then the replicas finish their answers and end."""
        ended = threading.Event()
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(number, lambda *_: ended.set()) for number in numbers]
        ended.wait()
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        serve.delete(NAME)


def connect() -> None:
    """Connect to the cluster of `RAY_ADDRESS`, or of this machine."""
    if ray.is_initialized():
        return
    try:
        ray.init(os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=False)
    except ConnectionError as error:
        raise UserError(
            f"--on ray found no Ray cluster ({_last_line(error)}); `ray start --head` starts one, "
            "and RAY_ADDRESS names one elsewhere"
        ) from None


def app(arguments: dict[str, str]) -> serve.Application:
    """For Ray's tools and configuration files: an open server of `run`, with these arguments."""
    given = {name: _argument(name, value) for name, value in arguments.items()}
    if "run" not in given:
        raise UserError(f"run=FOLDER is missing; arguments are {', '.join(_ARGUMENTS)}")
    run = Run.open(given["run"])
    longest = max(run.config.batch.source_length, 16)
    engine = engine_of(
        given.get("engine", "auto"), given.get("weights", ""), given.get("threads", 0)
    )
    served = Served(
        Path(given["run"]), "best", TranslateConfig(nbest=4, longest=longest), engine=engine
    )
    # Behind Ray's proxies, which may be on any address.
    settings = Settings(host="0.0.0.0", is_open=True)
    return deployed(served, settings, given.get("workers", 1), Access.of(settings).token)


def _argument(name: str, value: Any) -> Any:
    kind: Callable[[Any], Any] = _ARGUMENTS[one_of("argument", name, [*_ARGUMENTS])]
    try:
        return kind(value)
    except ValueError:
        raise UserError(f"{name}={value} is not a whole number") from None


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:300]
