"""Training steps on one GPU, timed and weighed: what the forecast is fitted to and held against.

    python -m benchmarks.forecast_gpu FOLDER

writes FOLDER/h200.json, and

    python -m benchmarks.forecast_gpu --against benchmarks/results/forecast_h200.json

prints the forecast of the same steps beside it, on any machine. The paper's dims with fewer experts
and layers, so that one GPU holds them, and a user's Llama; the state is donated, and all arrays are
made on the device. All steps are compiled at once and run from the smallest to the largest: the
allocator's peak is then that of the step that ran last, if compiling did not take more: run it
twice with JAX_COMPILATION_CACHE_DIR set, and keep what the second run wrote. Names of steps after
FOLDER leave the others out, and what is not compiled after `PATIENCE` seconds is left out too.
`--tiny` before FOLDER tries all of this on small sizes.
"""

from __future__ import annotations

import functools
import gc
import gzip
import json
import os
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")

import jax
import jax.numpy as jnp
import optax

from benchmarks.llama import Llama
from gshard.nn import FAMILY, Batch, Model, adafactor, init_state, train_step

FLAT = {"stacked": False, "dispatch": "flat", "random": "hash", "loss_chunks": 8}
LLAMA = {"layers": 16, "model": 2048, "heads": 32, "shared": 8, "hidden": 5632, "vocab": 32_000}

# name: (which model, its changes, tokens of a batch (of each side), what it is for)
CONFIGS: dict[str, tuple[str, dict, int, str]] = {
    "dense 12 layers": ("family", {"experts": 0}, 16_384, "fit"),
    "8 experts": ("family", {"experts": 8}, 16_384, "fit"),
    "32 experts": ("family", {"experts": 32}, 16_384, "check"),
    "dense, remat, 32k tokens": ("family", {"experts": 0, "remat": "layer"}, 32_768, "check"),
    "8 experts, remat, 32k tokens": ("family", {"experts": 8, "remat": "layer"}, 32_768, "check"),
    "8 experts, float32": ("family", {"experts": 8, "dtype": "float32"}, 8_192, "check"),
    "16 experts, layers apart": ("family", {"experts": 16, **FLAT}, 16_384, "check"),
    "Llama": ("llama", LLAMA, 8_192, "check"),
    "Llama, remat": ("llama", {**LLAMA, "remat": True}, 16_384, "check"),
}
TINY = {
    "model_dim": 64,
    "hidden_dim": 128,
    "heads": 4,
    "key_dim": 16,
    "value_dim": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "source_vocab": 128,
    "target_vocab": 128,
}
TINY_LLAMA = {"layers": 2, "model": 64, "heads": 4, "shared": 2, "hidden": 96, "vocab": 128}


def model_of(changes: dict, tokens: int) -> Model:
    """The paper's 12 layers, changed."""
    base = {"dtype": "bfloat16", "groups": None, **changes}
    return replace(FAMILY["moe_128e_12l"].replace(**base), devices=1, batch_tokens=tokens)


def batch_of(model: Model) -> Batch:
    shape = model.batch.source.shape
    tokens = jax.random.randint(jax.random.key(1), shape, 1, model.config.target_vocab)
    segments, positions = jnp.ones(shape, jnp.int32), jnp.tile(jnp.arange(shape[1]), (shape[0], 1))
    return Batch(tokens, segments, positions, tokens, tokens, segments, positions)


def lower(
    kind: str, changes: dict, tokens: int, jit: Callable = jax.jit
) -> tuple[Any, Any, Callable[[], tuple]]:
    """The step, how its state is made, and how the other arguments are.

    On one device `jax.jit` compiles what gshard would.
    """
    return (_family if kind == "family" else _llama)(changes, tokens, jit)


def _family(changes: dict, tokens: int, jit: Callable) -> tuple[Any, Any, Callable[[], tuple]]:
    model, optimizer = model_of(changes, tokens), adafactor()
    key = jax.eval_shape(lambda: jax.random.key(0))

    def init(key):
        return init_state(model.config, optimizer, key)

    def step(state, batch, key):
        return train_step(state, batch, key, optimizer=optimizer)

    lowered = jit(step, donate_argnums=0).lower(jax.eval_shape(init, key), model.batch, key)
    start = functools.partial(init, jax.random.key(0))
    return lowered, jax.jit(start).lower(), lambda: (batch_of(model), jax.random.key(2))


def _llama(changes: dict, tokens: int, jit: Callable) -> tuple[Any, Any, Callable[[], tuple]]:
    model, optimizer = Llama(dtype="bfloat16", **changes), optax.adam(1e-3)
    length = min(2048, tokens // 4)

    def init():
        params = model.params()
        return params, optimizer.init(params)

    def step(state, batch):
        params, moments = state
        loss, grads = jax.value_and_grad(model.loss)(params, batch)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    batch = jax.ShapeDtypeStruct((tokens // length, length), jnp.int32)
    lowered = jit(step, donate_argnums=0).lower(jax.eval_shape(init), batch)
    return (
        lowered,
        jax.jit(init).lower(),
        lambda: (jax.random.randint(jax.random.key(1), batch.shape, 0, model.vocab),),
    )


def planned_bytes(compiled: Any) -> int:
    """What XLA says that the step takes."""
    analysis = compiled.memory_analysis()
    return (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
    )


def measure(compiled: Any, init: Any, others: Callable[[], tuple], steps: int = 8) -> dict:
    state, rest = init(), others()
    jax.block_until_ready((state, rest))
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        state, metrics = compiled(state, *rest)
        jax.block_until_ready((state, metrics))
        times.append(time.perf_counter() - start)
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "step_seconds": sorted(times[2:])[len(times[2:]) // 2],
        "peak_bytes": stats.get("peak_bytes_in_use"),
        "xla_bytes": planned_bytes(compiled),
    }


def run(folder: Path, configs: dict[str, tuple[str, dict, int, str]], patience: float) -> None:
    """Compile all, then run one after the other; what ran is on disk at once."""
    begun = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    found = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "steps": {}}
    ready = _compiled(configs, patience)
    print(f"{len(ready)} compiled after {time.perf_counter() - begun:.0f} s", flush=True)
    for name in sorted(ready, key=lambda n: planned_bytes(ready[n][0])):
        kind, changes, tokens, use = configs[name]
        try:
            row = measure(*ready[name])
        except Exception as error:  # one that does not fit must not lose the others
            row = {"error": str(error)[:300], "xla_bytes": planned_bytes(ready[name][0])}
        about = {"model": kind, "changes": changes, "tokens": tokens, "for": use}
        found["steps"][name] = {**about, **row}
        (folder / "h200.json").write_text(json.dumps(found, indent=1) + "\n")
        print(f"{time.perf_counter() - begun:.0f} s", name, row, flush=True)
        gc.collect()
    for name, (compiled, *_) in ready.items():
        with gzip.open(folder / (re.sub(r"\W+", "_", name) + ".hlo.gz"), "wt") as file:
            file.write(compiled.as_text())


def _compiled(configs: dict[str, tuple[str, dict, int, str]], patience: float) -> dict[str, Any]:
    """What `measure` takes, of every step that is compiled in time."""
    pool = ThreadPoolExecutor(2 * len(configs))
    waiting: dict[str, tuple[Future, Future, Any]] = {}
    for name, (kind, changes, tokens, _) in configs.items():
        lowered, init, others = lower(kind, changes, tokens)
        waiting[name] = pool.submit(lowered.compile), pool.submit(init.compile), others
    wait([f for *both, _ in waiting.values() for f in both], patience)
    pool.shutdown(wait=False)
    return {
        name: (step.result(), init.result(), others)
        for name, (step, init, others) in waiting.items()
        if step.done() and init.done()
    }


def against(path: Path) -> None:
    """The forecast beside each measured step."""
    import gshard

    print("| training step | for | measured, ms | ours | error | measured, GB | ours | error |")
    print("|---|---|---|---|---|---|---|---|")
    for name, row in json.loads(path.read_text(encoding="utf-8"))["steps"].items():
        if "step_seconds" not in row:
            continue
        on_one = functools.partial(gshard.jit, devices=1)
        lowered, *_ = lower(row["model"], row["changes"], row["tokens"], on_one)
        found = lowered.forecast("h200")
        seconds, peak = row["step_seconds"], row["peak_bytes"] or row["xla_bytes"]
        print(
            f"| {name} | {row['for']} | {1e3 * seconds:.0f} | {1e3 * found.step_seconds:.0f} | "
            f"{found.step_seconds / seconds - 1:+.1%} | {peak / 1e9:.1f} | "
            f"{found.memory_bytes / 1e9:.1f} | {found.memory_bytes / peak - 1:+.1%} |",
            flush=True,
        )


def tiny() -> dict[str, tuple[str, dict, int, str]]:
    """Some of these steps, small."""
    return {
        name: (kind, {**changes, **(TINY if kind == "family" else TINY_LLAMA)}, 1024, use)
        for name, (kind, changes, _, use) in CONFIGS.items()
        if name in ("8 experts", "16 experts, layers apart", "Llama")
    }


def main() -> None:
    if sys.argv[1] == "--against":
        against(Path(sys.argv[2]))
        return
    small = sys.argv[1] == "--tiny"
    folder, *names = sys.argv[1 + small :]
    configs = tiny() if small else CONFIGS
    chosen = {n: c for n, c in configs.items() if not names or n in names}
    run(Path(folder), chosen, float(os.environ.get("PATIENCE", "600")))
    os._exit(0)  # whatever is still compiling


if __name__ == "__main__":
    main()
