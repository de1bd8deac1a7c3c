"""One device's work in programs of up to 2048 GPUs, on one GPU; the others are XLA's mock ones.

    python -m benchmarks.many_gpus                          all rows, some 12 minutes on an H200
    python -m benchmarks.many_gpus --only grow models       some of them
    python -m benchmarks.many_gpus --forecast results.json  adds what a laptop says of each row
    python -m benchmarks.many_gpus --show results.json      the tables of an earlier run

Collectives cost nothing here (`benchmarks.gpu.many`): times are those of one device's own work, and
forecasts are compared without their collectives. What is sent, and what of it no product hides, is
read off the compiled schedule.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.speed_gpu import CUBLAS, measure

ALONE = "--xla_gpu_shard_autotuning=false"  # else compiling waits for devices that are not there


def row(model: str, devices: int, experts: int, tokens: int, **more: Any) -> dict[str, Any]:
    """A case; `tokens` of the source on each device."""
    case = {"module": "many", "model": model, "devices": devices, "experts": experts}
    return {**case, "tokens": tokens, "flags": f"{CUBLAS} {ALONE}", **more}


SMALL = "moe_128e_12l"
CASES: dict[str, list[dict[str, Any]]] = {
    "grow": [
        row(SMALL, 1, 16, 65_536),
        row(SMALL, 8, 128, 65_536),
        row(SMALL, 64, 512, 65_536),
        row(SMALL, 512, 2048, 32_768),
        row(SMALL, 2048, 2048, 32_768),
    ],
    "models": [
        row("moe_2048e_36l", 2048, 2048, 16_384),
        row("moe_2048e_12l", 2048, 2048, 32_768),
        row("moe_512e_36l", 512, 512, 16_384),
        row("moe_512e_12l", 512, 512, 32_768),
        row("moe_128e_36l", 128, 128, 16_384),
        row("moe_128e_12l", 128, 128, 32_768),
    ],
    "xla": [
        row(SMALL, 8, 128, 65_536, partitioner="xla"),
        row(SMALL, 64, 512, 65_536, partitioner="xla"),
    ],
    "float8": [row(SMALL, 8, 128, 65_536, products="float8")],
}


def show(results: list[dict[str, Any]]) -> str:
    """The table of what was measured, and of what was forecast beside it."""
    head = (
        "model",
        "devices",
        "experts",
        "tokens a device",
        "partitioner",
        "products",
        "ms",
        "share of peak",
        "compile, s",
        "kernels",
        "GB sent",
        "exposed",
        "AllToAll, GB",
        "exposed",
        "GB of memory",
    )
    lines = [_line(head), _line(["---"] * 2 + ["---:"] * (len(head) - 2))]
    for case in results:
        about = (case["model"], case["devices"], case["experts"], f"{case['tokens']:,}")
        how = (case.get("partitioner", "gshard"), _products(case))
        if "ms" not in case:
            why = str(case.get("error", "")).strip().splitlines()[-1:] or ["failed"]
            lines.append(_line((*about, *how, why[0][:160], *[""] * (len(head) - 7))))
            continue
        speed = (f"{case['ms']:.1f}", f"{case['share']:.1%}", f"{case['compile_s']:.1f}")
        sent = (f"{case[k]:.2f}" for k in _SENT)
        last = f"{case['peak_gb']:.1f}"
        lines.append(_line((*about, *how, *speed, case["kernels"], *sent, last)))
    return "\n".join([*lines, "", *_forecasts(results)])


_SENT = ("sent_gb", "exposed_gb", "all_to_all_gb", "all_to_all_exposed_gb")


def _products(case: dict[str, Any]) -> str:
    chosen = case.get("products", "dtype")
    return "bfloat16" if chosen == "dtype" else chosen


def _forecasts(results: list[dict[str, Any]]) -> list[str]:
    known = [case for case in results if "forecast_ms" in case and "ms" in case]
    if not known:
        return []
    head = ("model", "devices", "ms", "forecast", "error", "GB", "forecast", "error", "program")
    lines = [_line(head), _line(["---", *["---:"] * 7, "---"])]
    for case in known:
        errors = [
            f"{case[ours] / case[theirs] - 1:+.1%}"
            for ours, theirs in (("forecast_ms", "ms"), ("forecast_gb", "peak_gb"))
        ]
        compared = case["jax"] == case["forecast_jax"] and "text" in case
        same = "the same" if case.get("text") == case["forecast_text"] else "another"
        lines.append(
            _line(
                (
                    case["model"] + (" in float8" if _products(case) == "float8" else ""),
                    case["devices"],
                    f"{case['ms']:.0f}",
                    f"{case['forecast_ms']:.0f}",
                    errors[0],
                    f"{case['peak_gb']:.1f}",
                    f"{case['forecast_gb']:.1f}",
                    errors[1],
                    same if compared else "",
                )
            )
        )
    return lines


def _line(cells: Any) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def add_forecasts(path: Path) -> None:
    """What this machine says of each row, into the file."""
    from benchmarks.gpu.many import forecast

    results = json.loads(path.read_text(encoding="utf-8"))
    for case in results:
        if "ms" in case and case.get("partitioner", "gshard") == "gshard":
            case.update(forecast(case))
            path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            print(case["model"], case["devices"], round(case["forecast_ms"]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no row after this")
    parser.add_argument("--show", type=Path, help="JSON of an earlier run: measure nothing")
    parser.add_argument("--forecast", type=Path, help="JSON of an earlier run, to add forecasts to")
    args = parser.parse_args()
    if args.forecast:
        add_forecasts(args.forecast)
        return
    if args.show:
        results = json.loads(args.show.read_text(encoding="utf-8"))
    else:
        args.out.mkdir(parents=True, exist_ok=True)
        cases = [case for name in args.only for case in CASES[name]]
        results = measure(cases, args.seconds, args.out, "many_gpus.json")
    print(show(results))


if __name__ == "__main__":
    main()
