"""Plots of forecasts as SVG files: memory, time against devices, breakdown, collectives."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gshard.explanation.page import growth_chart, memory_chart
from gshard.forecast import Forecast
from gshard.forecast.collective import collective_seconds
from gshard.forecast.report import time_bars
from gshard.models.family import PARTS, part_of
from gshard.pages import bars, lines

_DATA = 8 * 2**20  # bytes of the collectives that are compared, as in the paper's figure
_KINDS = ("all_reduce", "all_to_all", "all_gather")


def plot_forecast(forecast: Forecast, folder: Path, title: str) -> list[Path]:
    """Breakdown against roofline, and memory along the program, of one forecast."""
    parts = forecast.by(part_of)
    rows = time_bars({name: parts[name] for name in PARTS if name in parts})
    breakdown = bars(f"{title}: time of a step", rows)
    memory = memory_chart(forecast, f"{title}: memory on a device")
    return [breakdown.save(folder / "breakdown.svg"), memory.save(folder / "memory.svg")]


def plot_growth(found: Mapping[int, Forecast], folder: Path, title: str) -> list[Path]:
    """Step time and collective times against the number of devices."""
    machine = next(iter(found.values())).hardware
    counts = [2**n for n in range(4, 12)]
    times = {
        kind: [(d, 1e3 * collective_seconds(machine.topology(d), kind, _DATA)) for d in counts]
        for kind in _KINDS
    }
    collectives = lines(
        f"8 MiB collectives on {machine.name}", times, "devices", "ms", powers_of_two=True, log=True
    )
    step = growth_chart(found, f"{title}: time of a step")
    return [step.save(folder / "step_time.svg"), collectives.save(folder / "collectives.svg")]
