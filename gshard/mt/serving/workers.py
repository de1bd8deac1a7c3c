"""Several processes that serve one model: each has a copy of it, and all share one socket.

Uvicorn's supervisor starts them, replaces one that dies or hangs, and ends them on SIGTERM when
their answers are sent. They share the keys' counts, and the files of Prometheus' metrics.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import Multiprocess

from gshard.errors import UserError
from gshard.mt.decoding.detect import Detector, detector_of
from gshard.mt.decoding.engines import EngineConfig, open_translator
from gshard.mt.decoding.texts import TranslateConfig
from gshard.mt.launch.status import end_with_parent
from gshard.mt.run import Run
from gshard.mt.serving.server import Access, application, configured, listen
from gshard.mt.serving.service import Service
from gshard.mt.serving.settings import Settings

_METRICS = "PROMETHEUS_MULTIPROC_DIR"
_HUNG = 120  # seconds without a sign of life, after which a worker is replaced


@dataclass(frozen=True)
class Served:
    """What to serve: the weights of a run or release, and how to search."""

    run: Path
    checkpoint: str
    search: TranslateConfig
    devices: int = 0
    engine: EngineConfig = field(default_factory=EngineConfig)

    def open(self) -> tuple[Service, Detector | None]:
        """The service, which begins to compile, and the detector of languages if there can be."""
        run = Run.open(self.run)
        detector = detector_of(run)
        translator, step = open_translator(
            run, self.checkpoint, self.search, self.devices, engine=self.engine
        )
        service = Service(translator, run.name, step)
        service.warm_up()  # last: an error while a thread compiles would abort the process
        return service, detector


def worker(served: Served, settings: Settings, access: Access) -> Starlette:
    """The application of one worker, in its own process; an error would be that of every worker."""
    end_with_parent()  # else it would keep the port of a parent that was killed
    try:
        service, detector = served.open()
    except UserError as error:
        print(f"gshard: {error}", file=sys.stderr)
        sys.exit(STARTUP_FAILURE)
    return application(service, settings, access, detector)


class Workers:
    """Several workers behind one socket; `run` returns after SIGTERM or Ctrl-C."""

    def __init__(self, served: Served, settings: Settings, count: int):
        self._settings = settings
        self.socket = listen(settings)
        self.access = Access.of(settings, shared=True)
        self._app: Any = functools.partial(worker, served, settings, self.access)
        self._count = count

    @property
    def address(self) -> str:
        """Where a browser finds the page."""
        return self.access.address(self._settings, self.socket.getsockname()[1])

    def run(self) -> None:
        """Serve until a signal."""
        config = configured(
            self._app,
            self._settings,
            factory=True,
            workers=self._count,
            timeout_worker_healthcheck=_HUNG,
        )
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            os.environ[_METRICS] = folder  # of the workers, which are new processes
            Multiprocess(config, [self.socket]).run()
        self.access.close()
