"""How long it takes to see the largest steps before they run, and that it does not grow with D.

    python -m benchmarks.forecast_scale [FOLDER]

prints the seconds of this process for the 1-trillion-weight step and the 600-billion-weight one
(partitioned, forecast, explained, the page), then time and program size for 8 to 2048 devices;
with a FOLDER also as plots. Seconds are processor time, which other programs hardly change.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gshard.models.family import Deployment, plan
from gshard.nn import FAMILY

DEVICES = (8, 32, 128, 512, 2048)


def spent(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.process_time()
    result = work()
    return result, time.process_time() - start


def largest(name: str, remat: str) -> str:
    chosen = plan(name, remat=remat)
    lowered, lowering = spent(lambda: chosen.lowered("tpu-v3"))
    _, forecasting = spent(lambda: chosen.forecast("tpu-v3"))
    _, explaining = spent(lambda: lowered.explain("tpu-v3"))
    page, paging = spent(lambda: lowered.page("tpu-v3"))
    gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return (
        f"| {name} | {lowering:.1f} | {forecasting:.1f} | {explaining:.1f} | {paging:.1f} | "
        f"{len(page) / 1e6:.1f} | {gigabytes:.1f} |"
    )


def by_devices(devices: int) -> tuple[float, int]:
    """A model with an expert for each device, and as much work on each."""
    model = replace(
        FAMILY["moe_2048e_12l"].replace(experts=devices, groups=devices, dispatch="einsum"),
        devices=devices,
        batch_tokens=1024 * devices,
    )
    chosen = Deployment(model, 2048 * devices)
    lowered, seconds = spent(lambda: chosen.lowered("tpu-v3"))
    return seconds, lowered.num_equations


def main() -> None:
    print("| step | partition, s | forecast, s | explain, s | page, s | page, MB | memory, GB |")
    print("|---|---|---|---|---|---|---|")
    print(largest("moe_2048e_60l", "layer"), flush=True)
    print(largest("moe_2048e_36l", "layer"), flush=True)
    print("\n| devices | partition, s | equations |\n|---|---|---|")
    rows = {}
    for devices in DEVICES:
        rows[devices] = by_devices(devices)
        print(f"| {devices} | {rows[devices][0]:.1f} | {rows[devices][1]} |", flush=True)
    if sys.argv[1:]:
        plot(rows, Path(sys.argv[1]))


def plot(rows: dict[int, tuple[float, int]], folder: Path) -> list[Path]:
    from gshard.pages import lines

    folder.mkdir(parents=True, exist_ok=True)
    titles = {"seconds to partition": "flat_in_devices.svg", "equations": "flat_equations.svg"}
    return [
        lines(
            "a training step of 12 layers",
            {"step": [(devices, row[n]) for devices, row in rows.items()]},
            "devices",
            unit,
            powers_of_two=True,
        ).save(folder / name)
        for n, (unit, name) in enumerate(titles.items())
    ]


if __name__ == "__main__":
    main()
