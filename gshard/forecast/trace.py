"""The forecast step as a trace that Perfetto (ui.perfetto.dev) and Chrome show."""

from __future__ import annotations

from typing import Any

from gshard.forecast.report import Forecast


def trace(forecast: Forecast) -> dict[str, Any]:
    """One track for arithmetic and memory, one for links; all runs of an operator are one slice."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": forecast.hardware.name}}
    ]
    for track, name in enumerate(("arithmetic and memory", "links"), 1):
        events.append(
            {"ph": "M", "pid": 1, "tid": track, "name": "thread_name", "args": {"name": name}}
        )
    now = 0.0
    for t in forecast.operators:
        length = float(t.total_seconds) * 1e6
        events.append(
            {
                "ph": "X",
                "pid": 1,
                "tid": 2 if t.collective else 1,
                "ts": now,
                "dur": length,
                "name": t.collective or t.name,
                "cat": t.phase,
                "args": {
                    "line": t.source,
                    "runs": t.count,
                    "bound by": t.bound,
                    "flops": t.flops,
                    "bytes": t.bytes,
                    "sent": t.sent,
                    "reason": t.reason,
                },
            }
        )
        now += length
    return {"traceEvents": events, "displayTimeUnit": "ms"}
