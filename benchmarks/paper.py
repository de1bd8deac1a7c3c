"""The paper's figures (section 5 and its table of steps per second) beside ours.

    python -m benchmarks.paper

prints them all as Markdown. Three constants of TPU v3 are fitted: `skew_seconds`, how much later
the last device comes to a collective for each hop across the network, to the AllToAlls' share of a
layer; `step_seconds`, what a step takes outside of its program, to the steps per second (`--fit`
fits it again); and `hop_seconds`, to an AllReduce that takes as long on any number of devices.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.operators import OPERATORS, growth
from gshard.forecast import Forecast, Hardware, hardware
from gshard.forecast.collective import collective_seconds
from gshard.models.family import PARTS, part_of, plan

STEPS = {  # steps per second (table of section 4.4)
    "moe_2048e_36l": 0.72,
    "moe_2048e_12l": 2.15,
    "moe_512e_36l": 1.05,
    "moe_512e_12l": 3.28,
    "moe_128e_36l": 0.67,
    "moe_128e_12l": 2.16,
}
LAYER_GROWTH = 1.7  # a layer's time from 128 to 2048 experts
EXCHANGE_GROWTH = 9.0  # AllToAll from 16 to 2048 partitions
LAYER_EXCHANGE_GROWTH = 3.75  # a layer's AllToAlls from 128 to 2048 experts
MB = 2**20


@dataclass(frozen=True)
class PaperRow:
    """A model's steps per second, measured by the paper and predicted."""

    model: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """The relative error of the prediction."""
        return self.predicted / self.measured - 1


def steps_per_second(machine: Hardware | None = None) -> list[PaperRow]:
    """The paper's six models."""
    machine = machine or hardware("tpu-v3")
    return [
        PaperRow(name, measured, plan(name).forecast(machine).steps_per_second)
        for name, measured in STEPS.items()
    ]


def fitted_step() -> float:
    """The `step_seconds` with the least mean error."""
    machine = hardware("tpu-v3")
    efficiency = replace(machine.efficiency, step_seconds=0.0)
    rows = steps_per_second(machine.replace(efficiency=efficiency))
    outside = np.arange(0.0, 0.2, 0.005)
    errors = [
        np.mean([abs(1 / (1 / row.predicted + more) / row.measured - 1) for row in rows])
        for more in outside
    ]
    return float(outside[np.argmin(errors)])


def layer_times(forecasts: dict[int, Forecast]) -> dict[int, dict[str, float]]:
    """Seconds of each part in the forward pass of one MoE layer and the Transformer layer by it.

    The paper's figure has as many tokens on a device whatever the experts.
    """
    found = {}
    for experts, forecast in forecasts.items():
        parts = dict.fromkeys(PARTS[:5], 0.0)
        for operator in forecast.values:
            if operator.phase == "forward" and part_of(operator) in parts:
                parts[part_of(operator)] += float(operator.total_seconds)
        found[experts] = parts
    return found


def layer_forecasts() -> dict[int, Forecast]:
    """12 layers with 128, 512 and 2048 experts, and 2048 tokens on each device."""
    return {
        experts: plan(f"moe_{experts}e_12l", batch_tokens=2048 * experts).forecast("tpu-v3")
        for experts in (128, 512, 2048)
    }


def collective_growth(kind: str, size: int = 8 * MB) -> dict[int, float]:
    """Milliseconds of a collective on 16 to 2048 cores."""
    machine = hardware("tpu-v3")
    counts = [2**n for n in range(4, 12)]
    return {d: 1e3 * collective_seconds(machine.topology(d), kind, size) for d in counts}


def memory_rows() -> list[tuple[str, str, Forecast]]:
    """Memory per device, by experts and by layers, with rematerialization where it is needed."""
    names = ["moe_128e_12l", "moe_512e_12l", "moe_2048e_12l", "moe_2048e_36l", "moe_2048e_60l"]
    rows = []
    for name in names:
        for remat in ("none", "layer") if name != "moe_128e_12l" else ("none",):
            # As many tokens on each device for every model, as in the paper's largest.
            tokens = 2048 * int(name.split("_")[1][:-1])
            rows.append(
                (name, remat, plan(name, batch_tokens=tokens, remat=remat).forecast("tpu-v3"))
            )
    return rows


def _steps_table() -> list[str]:
    rows = steps_per_second()
    lines = ["| model | measured, steps/s | predicted | error |", "|---|---|---|---|"]
    lines += [
        f"| {r.model} | {r.measured:.2f} | {r.predicted:.2f} | {r.error:+.0%} |" for r in rows
    ]
    mean = np.mean([abs(r.error) for r in rows])
    return [*lines, "", f"Mean error {mean:.1%}, largest {max(abs(r.error) for r in rows):.1%}."]


def _layer_table() -> list[str]:
    forecasts = layer_forecasts()
    times = layer_times(forecasts)
    lines = ["| part, ms of a forward pass | 128 experts | 512 | 2048 |", "|---|---|---|---|"]
    for part in PARTS[:5]:
        cells = " | ".join(f"{1e3 * t[part]:.2f}" for t in times.values())
        lines.append(f"| {part} | {cells} |")
    totals = {e: sum(t.values()) for e, t in times.items()}
    lines.append("| all | " + " | ".join(f"{1e3 * t:.2f}" for t in totals.values()) + " |")
    exchange = times[2048]["dispatch and combine"] / times[128]["dispatch and combine"]
    return [
        *lines,
        "",
        f"From 128 to 2048 experts a layer takes {totals[2048] / totals[128]:.2f} times as long "
        f"(paper: {LAYER_GROWTH}), its AllToAlls {exchange:.2f} times ({LAYER_EXCHANGE_GROWTH}).",
    ]


def _collective_table() -> list[str]:
    exchange, reduced = collective_growth("all_to_all"), collective_growth("all_reduce")
    lines = ["| cores | AllToAll of 8 MB, ms | AllReduce of 8 MB, ms |", "|---|---|---|"]
    lines += [f"| {d} | {exchange[d]:.2f} | {reduced[d]:.2f} |" for d in exchange]
    grown = [times[2048] / times[16] for times in (exchange, reduced)]
    return [
        *lines,
        "",
        f"From 16 to 2048 cores AllToAll grows {grown[0]:.1f} times (paper: {EXCHANGE_GROWTH:.0f}),"
        f" AllReduce {grown[1]:.2f} times (flat).",
    ]


def _memory_table() -> list[str]:
    lines = [
        "| model | remat | weights and state, GB | temporary, GB | peak, GB | recomputation |",
        "|---|---|---|---|---|---|",
    ]
    rows = memory_rows()
    seconds = {name: f.step_seconds for name, remat, f in rows if remat == "none"}
    for name, remat, f in rows:
        state, temporary = f.memory.arguments / 1e9, f.memory.temporary / 1e9
        again = 1 - seconds[name] / f.step_seconds
        lines.append(
            f"| {name} | {remat} | {state:.2f} | {temporary:.2f} | {f.memory_bytes / 1e9:.2f} "
            f"| {again:.0%} |"
        )
    return lines


def _operator_table() -> list[str]:
    def power(exponent: float | None) -> str:
        return "0" if exponent is None else f"D^{exponent:.2f}"

    lines = [
        "| operator | compute, paper | here | communication, paper | here |",
        "|---|---|---|---|---|",
    ]
    for name, row in OPERATORS.items():
        compute, sent = growth(name)
        lines.append(
            f"| {name} | {power(row.compute)} | {power(compute)} | {power(row.communication)} | "
            f"{power(sent)} |"
        )
    return lines


SECTIONS = {
    "Steps per second": _steps_table,
    "A layer's time": _layer_table,
    "Collectives": _collective_table,
    "Memory per device": _memory_table,
    "Operators": _operator_table,
}


def main() -> None:
    """Print every table, or fit the constant."""
    if "--fit" in sys.argv[1:]:
        print(f"step_seconds = {fitted_step():.2g}")
        return
    chosen = [a for a in sys.argv[1:] if a in SECTIONS] or list(SECTIONS)
    for title, table in ((name, SECTIONS[name]) for name in chosen):
        print(f"## {title}\n\n" + "\n".join(table()) + "\n", flush=True)


if __name__ == "__main__":
    main()
