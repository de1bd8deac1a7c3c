"""The model's speed on one GPU, beside Hugging Face's NLLB-MoE from the same run.

    python -m benchmarks.speed_gpu                          everything, 10 minutes on an H200
    python -m benchmarks.speed_gpu --only train attention   some of it
    python -m benchmarks.speed_gpu --only text curve --text sample.npz
    python -m benchmarks.speed_gpu --show results.json      tables and plots of an earlier run

`text` and the rows of `curve` read real text, from a sample that `benchmarks.gpu.text` makes.
Every case runs in a process of its own with a time limit: one that fails is a line in the table.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import plots, report

# XLA's own Triton products are slower than cuBLAS's here, by more than they save in fusions.
CUBLAS = "--xla_gpu_enable_triton_gemm=false"
BASE = {
    "model_dim": 512,
    "hidden_dim": 2048,
    "heads": 8,
    "key_dim": 64,
    "value_dim": 64,
    "source_vocab": 32_000,
    "target_vocab": 16_000,
    "attention_dropout": 0.0,
}

REVERSED = BASE | {"source_vocab": 16_000, "target_vocab": 32_000}
# What the peer's model can be: its heads are as large as 16 of them in 1024, its vocabulary is one.
PEERS = {"key_dim": 64, "value_dim": 64, "source_vocab": 32_000, "target_vocab": 32_000}
# Rows that sentences of many languages and their English fill alike, which blocks of 64 divide.
LONG, SHORT, ROWS = 448, 256, 640


def train(name: str, experts: int, tokens: int, **more: Any) -> dict[str, Any]:
    case = {"module": "train", "name": name, "experts": experts, "tokens": tokens}
    return {**case, "flags": CUBLAS, **more}


def text(name: str, source: int, target: int, **more: Any) -> dict[str, Any]:
    """`base` on rows of these lengths, in groups of which each has 2,048 tokens of English."""
    case = train(name, 32, ROWS * source, lengths=(source, target), weights="float32", **more)
    return case | {"module": "text", "workers": 10, "config": {"groups": ROWS * SHORT // 2048}}


DROPLESS = ("", ", no capacity", ", a slot for every choice")
CASES: dict[str, list[dict[str, Any]]] = {
    "train": [
        train("growth", 128, 131_072, profile=True),
        train("growth", 32, 131_072),
        train("growth", 8, 131_072),
        text("base", LONG, SHORT, dims=BASE) | {"module": "train"},
        train("plain", 128, 32_768, tuned=False, flags=""),
    ],
    "peer": [
        {"module": "peer", "experts": 32, "tokens": 16_384},
        train("the peer's dims and batch", 32, 16_384, dims=PEERS),
        train("the peer's batch, heads of 128", 32, 16_384),
    ],
    "decode": [
        {"experts": 32, "sentences": sentences, **way}
        for sentences in (1, 64, 256)
        for way in (
            {"module": "decode"},
            {"module": "decode", "name": "int8 weights", "int8": True},
            {"module": "peer"},
        )
    ],
    "text": [
        text("real text into English", LONG, SHORT, dims=BASE),
        text("real text out of English", SHORT, LONG, dims=REVERSED, reverse=True),
    ],
    "curve": [
        train("curve", 32, 16_384, lengths=(128, 80), dims=BASE, config={"stacked": True})
        | {"module": "curve", "workers": 10, "steps": 600, "limit": 240},
    ],
    "float8": [
        train("bfloat16", 128, 131_072, profile=True),
        train("float8", 128, 131_072, profile=True, config={"products": "float8"}),
    ],
    "dropless": [  # on one batch a few experts get most tokens after some steps, if routers learn
        train(f"{name}{', routers as they begin' if rate < 1 else ''}", 128, 131_072, **more)
        | {"rate": rate}
        for rate in (1.0, 1e-30)
        for name, more in (
            ("with a capacity", {}),
            ("without a capacity", {"config": {"dispatch": "dropless"}}),
        )
    ],
    "curve8": [
        train("curve", 32, 16_384, lengths=(128, 80), dims=BASE, config={"stacked": True})
        | {"module": "curve", "steps": 600, "limit": 300, "seeds": 3}
        | {"ways": ["bfloat16, rounded at random", "bfloat16, rounded at random, float8 products"]},
    ],
    "curve_exchange": [
        train("curve", 32, 16_384, lengths=(128, 80), dims=BASE, config={"stacked": True})
        | {"module": "curve", "steps": 600, "limit": 300, "seeds": 1}
        | {"ways": ["bfloat16, rounded at random", "bfloat16, rounded at random, float8 exchange"]},
    ],
    "curve_dropless": [
        train("curve", 32, 16_384, lengths=(128, 80), dims=BASE, config={"stacked": True})
        | {"module": "curve", "steps": 600, "limit": 300, "seeds": 2}
        | {"ways": [f"bfloat16, rounded at random{way}" for way in DROPLESS]},
    ],
    "compile": [
        train(name, 128, 131_072, cache=cache) | {"module": "compiling"}
        for name, cache in (("first", "empty"), ("again", "kept"))
    ]
    + [
        train(name, 128, 131_072, cache="kept", keeps_step=True) | {"module": "compiling"}
        for name in ("the step of `gshard train`, first", "found by its settings")
    ],
    "attention": [
        {"module": "attention", "tokens": 65_536, "blocks": [(64, 32, 4, 3), (64, 64, 4, 2)]},
    ],
}

WITHOUT_TEXT = [name for name in CASES if "curve" not in name and name != "text"]


def run_case(case: dict[str, Any], out: Path) -> dict[str, Any]:
    """The case in a process of its own."""
    result = out / f"case_{os.getpid()}.json"
    environment = {
        **os.environ,
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.94",
        "XLA_FLAGS": case.get("flags", ""),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "PYTHONUNBUFFERED": "1",
    }
    if "cache" in case:  # of compiled programs
        kept = out / "compiled"
        if case["cache"] == "empty":
            shutil.rmtree(kept, ignore_errors=True)
        environment["JAX_COMPILATION_CACHE_DIR"] = str(kept.resolve())
    command = [
        sys.executable,
        "-m",
        "benchmarks.speed_gpu",
        "--case",
        json.dumps(case),
        str(result),
    ]
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            command, env=environment, timeout=case.get("limit", 180), capture_output=True, text=True
        )
        if result.exists():
            found = json.loads(result.read_text())
            result.unlink()
        else:
            found = {"error": done.stderr[-1500:] + done.stdout[-300:]}
    except subprocess.TimeoutExpired as error:
        found = {"error": f"longer than {error.timeout} s", "output": str(error.stdout)[-500:]}
    return {**case, **found, "wall_s": time.perf_counter() - begin}


def child(case: dict[str, Any], path: str) -> None:
    if cache := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        os.makedirs(cache, exist_ok=True)
    module = importlib.import_module(f"benchmarks.gpu.{case['module']}")
    Path(path).write_text(json.dumps(module.measure(case)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=WITHOUT_TEXT)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--cases", type=Path, help="JSON with cases instead of the usual ones")
    parser.add_argument(
        "--text", type=Path, help="a sample of real text, for `text` and the curves"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no case after this")
    parser.add_argument("--show", type=Path, help="JSON of an earlier run: measure nothing")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        child(json.loads(args.case[0]), args.case[1])
        return
    args.out.mkdir(parents=True, exist_ok=True)
    if args.show:
        results = json.loads(args.show.read_text())
    else:
        cases = [case for name in args.only for case in CASES[name]]
        if args.cases:
            cases = json.loads(args.cases.read_text())
        results = measure([{**c, "text": str(args.text)} for c in cases], args.seconds, args.out)
    print(report(results))
    plots(results, args.out)


def measure(
    cases: list[dict[str, Any]], seconds: float, out: Path, name: str = "speed_gpu.json"
) -> list[dict[str, Any]]:
    """Case by case; what is there so far is always on disk."""
    begin, results = time.perf_counter(), []
    for case in cases:
        if time.perf_counter() - begin > seconds:
            break
        found = run_case(case, out)
        results.append(found)
        short = {k: v for k, v in found.items() if k not in ("kernels", "blocks", "curves")}
        print(json.dumps(short)[:1800], flush=True)
        (out / name).write_text(json.dumps(results, indent=1) + "\n")
    return results


if __name__ == "__main__":
    main()
