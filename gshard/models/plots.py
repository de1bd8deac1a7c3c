"""Plots of forecasts, as PNG: memory, time against devices, breakdown, collectives."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gshard.forecast import Forecast
from gshard.forecast.collective import collective_seconds
from gshard.models.family import PARTS, part_of


def plot_forecast(forecast: Forecast, folder: Path, title: str) -> list[Path]:
    """Breakdown against roofline, and memory along the program, of one forecast."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    parts = {n: p for n, p in forecast.by(part_of).items() if p.seconds > 0}
    names = [n for n in PARTS if n in parts]
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    left = range(len(names))
    axes.bar([x - 0.2 for x in left], [parts[n].seconds for n in names], 0.4, label="forecast")
    axes.bar(
        [x + 0.2 for x in left], [parts[n].roofline_seconds for n in names], 0.4, label="roofline"
    )
    axes.set_xticks(list(left), names, rotation=30, ha="right")
    axes.set(ylabel="seconds of a step", title=title)
    axes.legend()
    paths = [folder / "breakdown.png", folder / "memory.png"]
    figure.savefig(paths[0], dpi=120)
    figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
    held = forecast.memory.peak - forecast.memory.temporary
    axes.fill_between(
        range(len(forecast.memory.along)), [(held + b) / 1e9 for b in forecast.memory.along]
    )
    axes.axhline(forecast.hardware.memory / 1e9, color="black", linestyle=":")
    axes.set(xlabel="operators of the program", ylabel="GB on a device", title=title)
    figure.savefig(paths[1], dpi=120)
    plt.close("all")
    return paths


def plot_growth(found: Mapping[int, Forecast], folder: Path, title: str) -> list[Path]:
    """Step time and collective times against the number of devices."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    machine = next(iter(found.values())).hardware
    paths = [folder / "step_time.png", folder / "collectives.png"]
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    axes.plot(list(found), [f.step_seconds for f in found.values()], marker="o")
    axes.set(
        xscale="log", ylim=(0, None), ylabel="seconds of a step", xlabel="devices", title=title
    )
    figure.savefig(paths[0], dpi=120)
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    counts = [2**n for n in range(4, 12)]
    for kind in ("all_reduce", "all_to_all", "all_gather"):
        times = [collective_seconds(machine.topology(d), kind, 8 * 2**20) for d in counts]
        axes.plot(counts, [1e3 * t for t in times], marker="o", label=kind)
    axes.set(xscale="log", yscale="log", ylabel="ms for 8 MB", xlabel="devices")
    axes.legend()
    figure.savefig(paths[1], dpi=120)
    plt.close("all")
    return paths
