"""The model's speed on one GPU, beside Hugging Face's NLLB-MoE from the same run.

    python -m benchmarks.speed_gpu                          everything, 15 minutes on an H200
    python -m benchmarks.speed_gpu --only train attention   some of it
    python -m benchmarks.speed_gpu --out folder             JSON, and the plots of the docs

Every case runs in a process of its own with a time limit: one that fails is a line in the table.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BLOCKS = [(64, 64, 4, 2), (128, 64, 4, 2), (128, 64, 8, 2), (64, 64, 4, 3), (128, 128, 8, 2)]
CASES: dict[str, list[dict[str, Any]]] = {
    "attention": [{"module": "attention", "tokens": 65536, "blocks": BLOCKS}],
    "train": [{"module": "train", "experts": 128, "tokens": 65536, "profile": True}],
    "decode": [{"module": "decode", "experts": 32, "sentences": 64, "profile": True}],
}


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
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--cases", help="a file of JSON with cases instead of the usual ones")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no case after this")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        child(json.loads(args.case[0]), args.case[1])
        return
    args.out.mkdir(parents=True, exist_ok=True)
    cases = [case for name in args.only for case in CASES[name]]
    if args.cases:
        cases = json.loads(Path(args.cases).read_text())
    begin, results = time.perf_counter(), []
    for case in cases:
        if time.perf_counter() - begin > args.seconds:
            break
        found = run_case(case, args.out)
        results.append(found)
        short = {k: v for k, v in found.items() if k not in ("kernels", "blocks")}
        print(json.dumps(short)[:1800], flush=True)
        (args.out / "speed_gpu.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
