"""What a run writes down as it goes: JSON lines for programs, and TensorBoard files for people.

A run that died may have logged steps that its last checkpoint does not have; they are removed when
it resumes, so that the file always describes one uninterrupted training. Writing never ends or
delays a training: what cannot be written to a full disk is kept and written later.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorboardX import summary
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import RecordWriter

from gshard.mt import atomic
from gshard.mt.run import METRICS, Run

_NOT_CURVES = ("kind", "step")
_WAITING = 100_000  # lines kept while they cannot be written; then the oldest are lost


class Journal:
    """The records of a run from `step` on; `note` is called when they cannot be written."""

    def __init__(self, run: Run, step: int, note: Callable[[str], None] = print):
        self._path: Path = run.folder / METRICS
        kept = [record for record in run.metrics() if record["step"] <= step]
        with atomic.new_file(self._path) as part:
            part.write_text("".join(_line(record) for record in kept), encoding="utf-8")
        self._whole = self._path.stat().st_size  # bytes of lines that were written to their end
        self._waiting: deque[str] = deque(maxlen=_WAITING)
        self._curves = _Curves(run.folder / "tensorboard", step + 1)
        self._note, self._failed = note, False

    def write(self, kind: str, step: int, **values: Any) -> dict[str, Any]:
        """Add a record of a step; None is left out."""
        known = {name: value for name, value in values.items() if value is not None}
        record = {"kind": kind, "step": step, **known}
        self._waiting.append(_line(record))
        try:
            self._write_lines()
            self._curves.write(kind, record)
        except OSError as error:
            if not self._failed:
                self._note(f"the figures cannot be written ({error.strerror}); training continues")
            self._failed = True
        else:
            if self._failed:
                self._note("the figures are written again")
            self._failed = False
        return record

    def _write_lines(self) -> None:
        data = "".join(self._waiting).encode()
        with self._path.open("r+b", buffering=0) as file:
            file.truncate(self._whole)  # the half of a line that a full disk took
            file.seek(self._whole)
            view = memoryview(data)
            while view:
                view = view[file.write(view) or 0 :]
        self._whole += len(data)
        self._waiting.clear()

    def close(self) -> None:
        """Finish both files."""
        with contextlib.suppress(OSError):
            if self._waiting:
                self._write_lines()
        self._curves.close()


class _Curves:
    """TensorBoard's event files, written at once: no thread that could die or be waited for.

    After a failure the next record begins a new file, since readers stop at a truncated record.
    """

    def __init__(self, folder: Path, first_step: int):
        self._folder, self._first = folder, first_step
        self._numbers = itertools.count()
        self._writer: RecordWriter | None = None

    def write(self, kind: str, record: dict[str, Any]) -> None:
        try:
            if self._writer is None:
                self._writer = self._begin()
            for name, value in record.items():
                if name not in _NOT_CURVES:
                    curve = summary.scalar(f"{kind}/{name}", value)
                    self._write(summary=curve, step=record["step"])
            self._writer.flush()
        except OSError:
            self.close()
            raise

    def _write(self, **event: Any) -> None:
        assert self._writer is not None
        now = time.time()  # noqa: TID251  (a date)
        self._writer.write(Event(wall_time=now, **event).SerializeToString())

    def _begin(self) -> RecordWriter:
        self._folder.mkdir(parents=True, exist_ok=True)
        process = f"{socket.gethostname()}.{os.getpid()}.{next(self._numbers)}"
        now = time.time()  # noqa: TID251  (a date)
        name = f"events.out.tfevents.{int(now)}.{process}"
        self._writer = RecordWriter(str(self._folder / name))
        self._write(file_version="brain.Event:2")
        # Tells readers that an earlier process's records from this step on do not count.
        self._write(session_log=SessionLog(status=SessionLog.START), step=self._first)
        return self._writer

    def close(self) -> None:
        if self._writer is not None:
            with contextlib.suppress(OSError, ValueError):
                self._writer.close()
        self._writer = None


def _line(record: dict[str, Any]) -> str:
    """JSON has no NaN or infinity: they become null, which every reader knows."""
    plain = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }
    return json.dumps(plain, allow_nan=False) + "\n"
