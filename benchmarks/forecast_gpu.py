"""Training steps on one GPU, timed and weighed: what the forecast is fitted to and held against.

    python -m benchmarks.forecast_gpu FOLDER

writes FOLDER/h200.json, and

    python -m benchmarks.forecast_gpu --against benchmarks/results/forecast_h200.json

prints the forecast of the same steps beside it, on any machine. The paper's dims with fewer experts
and layers, so that one GPU holds them; the state is donated, and all arrays are made on the device.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp

from gshard.nn import FAMILY, Batch, Model, adafactor, init_state, train_step

# name: (changes of the config, tokens of each side, what it is for)
CONFIGS: dict[str, tuple[dict, int, str]] = {
    "dense 12 layers": ({"experts": 0}, 16_384, "fit"),
    "8 experts": ({"experts": 8}, 16_384, "fit"),
    "32 experts": ({"experts": 32}, 16_384, "check"),
    "32 experts, 32k tokens": ({"experts": 32}, 32_768, "check"),
    "8 experts, remat": ({"experts": 8, "remat": "layer"}, 32_768, "check"),
    "32 experts, float32": ({"experts": 32, "dtype": "float32"}, 8_192, "check"),
}


def model_of(changes: dict, tokens: int) -> Model:
    """The paper's 12 layers, changed."""
    base = {"dtype": "bfloat16", "groups": None, **changes}
    return replace(FAMILY["moe_128e_12l"].replace(**base), devices=1, batch_tokens=tokens)


def batch_of(model: Model) -> Batch:
    shape = model.batch.source.shape
    tokens = jax.random.randint(jax.random.key(1), shape, 1, 30_000)
    segments, positions = jnp.ones(shape, jnp.int32), jnp.tile(jnp.arange(shape[1]), (shape[0], 1))
    return Batch(tokens, segments, positions, tokens, tokens, segments, positions)


def lower(model: Model, jit: Callable = jax.jit) -> tuple[Any, Callable]:
    """The step, and how its state is made; on one device `jax.jit` compiles what gshard would."""
    optimizer = adafactor()
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(lambda k: init_state(model.config, optimizer, k), key)

    def step(state, batch, key):
        return train_step(state, batch, key, optimizer=optimizer)

    lowered = jit(step, donate_argnums=0).lower(state, model.batch, key)
    return lowered, jax.jit(lambda k: init_state(model.config, optimizer, k))


def measure(model: Model, steps: int = 6) -> dict:
    lowered, init = lower(model)
    start = time.perf_counter()
    compiled = lowered.compile()
    compiling = time.perf_counter() - start
    analysis = compiled.memory_analysis()
    planned = (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
    )
    state, batch, key = init(jax.random.key(0)), batch_of(model), jax.random.key(2)
    jax.block_until_ready((state, batch))
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        state, metrics = compiled(state, batch, key)
        jax.block_until_ready((state, metrics))
        times.append(time.perf_counter() - start)
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "step_seconds": sorted(times[1:])[len(times[1:]) // 2],
        "peak_bytes": stats.get("peak_bytes_in_use"),
        "xla_bytes": planned,
        "compile_seconds": compiling,
    }


def against(path: Path) -> None:
    import gshard

    print("| training step | for | measured, ms | ours | error | measured, GB | ours | error |")
    print("|---|---|---|---|---|---|---|---|")
    for name, row in json.loads(path.read_text(encoding="utf-8"))["steps"].items():
        if "step_seconds" not in row:
            continue
        model = model_of(row["changes"], row["tokens"])
        found = lower(model, functools.partial(gshard.jit, devices=1))[0].forecast("h200")
        seconds, peak = row["step_seconds"], row["peak_bytes"]
        print(
            f"| {name} | {row['for']} | {1e3 * seconds:.0f} | {1e3 * found.step_seconds:.0f} | "
            f"{found.step_seconds / seconds - 1:+.1%} | {peak / 1e9:.1f} | "
            f"{found.memory_bytes / 1e9:.1f} | {found.memory_bytes / peak - 1:+.1%} |",
            flush=True,
        )


def main() -> None:
    if sys.argv[1] == "--against":
        against(Path(sys.argv[2]))
        return
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    only = sys.argv[2:]
    found = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "steps": {}}
    for name, (changes, tokens, use) in CONFIGS.items():
        if only and name not in only:
            continue
        try:
            row = measure(model_of(changes, tokens))
        except Exception as error:  # one that does not fit must not lose the others
            row = {"error": str(error)[:300]}
        found["steps"][name] = {"changes": changes, "tokens": tokens, "for": use, **row}
        (folder / "h200.json").write_text(json.dumps(found, indent=1) + "\n")
        print(name, row, flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
