"""What a run writes down as it goes: JSON lines for programs, and TensorBoard files for people.

A run that died may have logged steps that its last checkpoint does not have; they are cut off when
it goes on, so that the file always tells of one uninterrupted training.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

from gshard.mt import atomic
from gshard.mt.run import METRICS, Run

_NOT_CURVES = ("kind", "step")


class Journal:
    """The records of a run from `step` on."""

    def __init__(self, run: Run, step: int):
        path: Path = run.folder / METRICS
        kept = [record for record in run.metrics() if record["step"] <= step]
        with atomic.new_file(path) as part:
            part.write_text("".join(_line(record) for record in kept), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(run.folder / "tensorboard"), purge_step=step + 1)

    def write(self, kind: str, step: int, **values: Any) -> dict[str, Any]:
        """Add a record of a step; None is left out."""
        known = {name: value for name, value in values.items() if value is not None}
        record = {"kind": kind, "step": step, **known}
        self._file.write(_line(record))
        self._file.flush()
        for name, value in record.items():
            if name not in _NOT_CURVES:
                self._board.add_scalar(f"{kind}/{name}", value, step)
        return record

    def close(self) -> None:
        """Finish both files; on a full disk TensorBoard's copy of the figures may lack the last."""
        self._file.close()
        try:
            self._board.close()
        except (OSError, ValueError):
            # It would try once more as the process ends, and fail with a traceback.
            for writer in self._board.all_writers.values():
                writer.event_writer._closed = True


def _line(record: dict[str, Any]) -> str:
    """JSON has no NaN or infinity: they become null, which every reader knows."""
    plain = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }
    return json.dumps(plain, allow_nan=False) + "\n"
