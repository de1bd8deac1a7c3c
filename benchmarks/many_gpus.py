"""One device's work in programs of up to 2048 GPUs, on one GPU; the others are XLA's mock ones.

    python -m benchmarks.many_gpus                            all rows, on one GPU
    python -m benchmarks.many_gpus --only large xla           some of them
    python -m benchmarks.many_gpus --add results.json         new measurements into a file
    python -m benchmarks.many_gpus --forecast results.json    forecasts of all rows, on any machine
    python -m benchmarks.many_gpus --show results.json        the tables of such a file

Collectives cost nothing here (`benchmarks.gpu.many`): times are those of one device's own work, and
forecasts are compared without their collectives. What is sent, and what of it no product hides, is
read off the compiled schedule.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.speed_gpu import CUBLAS, measure

ALONE = "--xla_gpu_shard_autotuning=false"  # else compiling waits for devices that are not there


def row(model: str, devices: int, experts: int, tokens: int, **more: Any) -> dict[str, Any]:
    """A case; `tokens` of the source on each device."""
    case = {"module": "many", "model": model, "devices": devices, "experts": experts}
    return {**case, "tokens": tokens, "flags": f"{CUBLAS} {ALONE}", **more}


SMALL = "moe_128e_12l"
DEEP = 300  # seconds for a row of 36 layers, which needs more than 110 (docs/results/many-gpus.md)
CASES: dict[str, list[dict[str, Any]]] = {
    "grow": [
        row(SMALL, 1, 16, 65_536),
        row(SMALL, 8, 128, 65_536),
        row(SMALL, 64, 512, 65_536),
    ],
    "large": [
        row(SMALL, 512, 2048, 32_768),
        row("moe_2048e_12l", 2048, 2048, 32_768),
        row("moe_2048e_36l", 2048, 2048, 16_384, limit=DEEP),
    ],
    "shallow": [  # the paper's others; those of 2048 experts are above
        row("moe_512e_12l", 512, 512, 32_768),
        row("moe_128e_12l", 128, 128, 32_768),
    ],
    "deep": [
        row("moe_512e_36l", 512, 512, 16_384, limit=DEEP),
        row("moe_128e_36l", 128, 128, 16_384, limit=DEEP),
    ],
    "xla": [
        row(SMALL, 8, 128, 65_536, partitioner="xla"),
        row(SMALL, 64, 512, 65_536, partitioner="xla"),
    ],
    "float8": [row(SMALL, 8, 128, 65_536, products="float8")],
    "exchange": [row(SMALL, 8, 128, 65_536, exchange="float8")],
    "real": [  # numbers in the place of what mock collectives leave
        row(SMALL, 8, 128, 65_536, numbers="real"),
        row("moe_2048e_36l", 2048, 2048, 16_384, limit=DEEP, numbers="real"),
    ],
}


_CASE = ("model", "devices", "experts", "tokens", "partitioner", "products")
_CASE += ("overlap", "scheduler", "exchange", "numbers")
_SENT = ("sent_gb", "exposed_gb", "all_to_all_gb", "all_to_all_exposed_gb")


def show(results: list[dict[str, Any]]) -> str:
    """The tables: what was measured, forecasts beside it, and forecasts of rows that were not."""
    tried = [case for case in results if "ms" in case or "error" in case]
    both = [case for case in results if "ms" in case and "forecast_ms" in case]
    alone = [case for case in results if "ms" not in case and "forecast_ms" in case]
    tables = ((tried, _measured), (both, _compared), (alone, _forecast_alone))
    return "\n\n".join("\n".join(table(cases)) for cases, table in tables if cases)


def _measured(results: list[dict[str, Any]]) -> Iterator[str]:
    columns = ("ms", "share of peak", "compile, s", "kernels", "GB sent", "exposed")
    columns += ("AllToAll, GB", "exposed", "GB of memory")
    yield from _head((*_ABOUT, *columns), len(columns))
    for case in results:
        if "ms" not in case:
            why = str(case.get("error", "")).strip().splitlines()[-1:] or ["failed"]
            yield _line((*_about(case), why[0][:160], *[""] * (len(columns) - 1)))
            continue
        speed = (f"{case['ms']:.1f}", f"{case['share']:.1%}", f"{case['compile_s']:.1f}")
        sent = (f"{case[k]:.2f}" for k in _SENT)
        yield _line((*_about(case), *speed, case["kernels"], *sent, f"{case['peak_gb']:.1f}"))


def _compared(results: list[dict[str, Any]]) -> Iterator[str]:
    columns = ("ms", "forecast", "error", "GB of memory", "forecast", "error", "GB sent")
    columns += ("forecast", "AllToAll exposed", "forecast", "ms with links", "share with links")
    columns += ("program",)
    yield from _head((*_ABOUT, *columns), len(columns))
    for case in results:
        compared = case["jax"] == case["forecast_jax"] and "text" in case
        same = "the same" if case.get("text") == case["forecast_text"] else "another"
        time = (f"{case['ms']:.0f}", f"{case['forecast_ms']:.0f}", _error(case, "ms", "ms"))
        memory = (f"{case['peak_gb']:.1f}", f"{case['forecast_gb']:.1f}")
        sent = (f"{case['sent_gb']:.2f}", f"{case['forecast_sent_gb']:.2f}")
        hidden = "all_to_all_exposed_gb"
        found = case.get(f"forecast_{hidden}")  # forecasts of earlier versions have none
        sent += (f"{case[hidden]:.2f}", "" if found is None else f"{found:.2f}")
        links = case.get("forecast_exposed_ms")
        sent += ("" if links is None else f"{case['forecast_ms'] + links:.0f}",)
        share = None if links is None else case["share"] * case["ms"] / (case["ms"] + links)
        sent += ("" if share is None else f"{share:.1%}",)
        error = _error(case, "peak_gb", "gb")
        yield _line((*_about(case), *time, *memory, error, *sent, same if compared else ""))


def _forecast_alone(results: list[dict[str, Any]]) -> Iterator[str]:
    columns = ("ms, forecast", "share of peak", "collectives, ms", "GB sent", "AllToAll, GB")
    columns += ("GB of memory",)
    yield from _head((*_ABOUT, *columns), len(columns))
    for case in results:
        time = (f"{case['forecast_ms']:.0f}", f"{case['forecast_share']:.1%}")
        links = f"{case['forecast_links_ms']:.0f}"
        sent = (f"{case['forecast_sent_gb']:.2f}", f"{case['forecast_all_to_all_gb']:.2f}")
        yield _line((*_about(case), *time, links, *sent, f"{case['forecast_gb']:.1f}"))


_ABOUT = ("model", "devices", "experts", "tokens a device", "partitioner", "products", "settings")


def _about(case: dict[str, Any]) -> tuple[Any, ...]:
    products = case.get("products", "dtype")
    return (
        case["model"],
        case["devices"],
        case["experts"],
        f"{case['tokens']:,}",
        case.get("partitioner", "gshard"),
        "bfloat16" if products == "dtype" else products,
        ", ".join(_settings(case)),
    )


def _settings(case: dict[str, Any]) -> Iterator[str]:
    """What differs from the defaults; `overlap` was a keyword of earlier versions."""
    if case.get("overlap"):
        yield "overlap" if case["overlap"] == "auto" else "overlap everywhere"
    if "scheduler" in case:
        yield f"{case['scheduler']} scheduler"
    if case.get("exchange", "dtype") != "dtype":
        yield f"{case['exchange']} exchange"
    if "numbers" in case:
        yield f"{case['numbers']} numbers"


def _error(case: dict[str, Any], measured: str, forecast: str) -> str:
    return f"{case[f'forecast_{forecast}'] / case[measured] - 1:+.1%}"


def _head(names: Any, numbers: int) -> Iterator[str]:
    yield _line(names)
    words = ["---", "---:", "---:", "---:", "---", "---", "---"]
    yield _line([*words, *["---:"] * numbers])


def _line(cells: Any) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of both: a new measurement replaces an old one, a failure never does."""
    found = {_key(case): case for case in old}
    for case in new:
        before = found.get(_key(case), {})
        if "ms" in case:
            forecasts = {k: v for k, v in before.items() if k.startswith("forecast_")}
            found[_key(case)] = {**forecasts, **case}
        elif "ms" not in before:
            found[_key(case)] = {**before, **case}
    return list(found.values())


def _key(case: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(case.get(name) for name in _CASE)


def add_forecasts(path: Path, cases: list[dict[str, Any]]) -> None:
    """This machine's forecasts of the rows into the file, whether or not they were measured."""
    from benchmarks.gpu.many import forecast

    for case in cases:
        if case.get("partitioner", "gshard") != "gshard":
            continue  # only gshard's own programs can be forecast
        results = _read(path)
        known = {_key(row): row for row in results}
        if _key(case) not in known:
            results.append(known.setdefault(_key(case), dict(case)))
        known[_key(case)].update(forecast(case))
        _write(path, results)
        print(case["model"], case["devices"], round(known[_key(case)]["forecast_ms"]), flush=True)


def _read(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
    return found


def _write(path: Path, results: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no row after this")
    parser.add_argument("--show", type=Path, help="JSON of an earlier run: measure nothing")
    parser.add_argument("--add", type=Path, help="JSON of earlier runs, to add this one to")
    parser.add_argument("--forecast", type=Path, help="JSON to add forecasts to: measure nothing")
    args = parser.parse_args()
    if args.show and not args.show.is_file():
        parser.error(f"no results at {args.show}")
    cases = [case for name in args.only for case in CASES[name]]
    if args.forecast:
        add_forecasts(args.forecast, cases)
    elif args.show is None:
        args.out.mkdir(parents=True, exist_ok=True)
        results = measure(cases, args.seconds, args.out, "many_gpus.json")
        if args.add:
            _write(args.add, merged(_read(args.add), results))
    shown = args.show or args.forecast or args.add or args.out / "many_gpus.json"
    print(show(_read(shown)))


if __name__ == "__main__":
    main()
