"""Hugging Face's models through `gshard.contrib.torch`: values, bytes, and layouts found.

    python -m benchmarks.torch_models               all of them: about a minute each on a free core
    python -m benchmarks.torch_models llama mixtral some
    python -m benchmarks.torch_models --jobs 16 --out docs/results/torch.md
    python -m benchmarks.torch_models --full llama  Llama 3 8B, forecast for 64 H100

Models are small (2 layers, 64 wide, random weights), in evaluation mode, so that both libraries
compute the same. Rows are kept in benchmarks/results/torch_models.json: a run of
some models renews theirs, and the table is made of all. Needs the extra `huggingface`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import textwrap
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

# Compiled without LLVM's expensive passes: nothing here is timed but our own work.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

import gshard
from gshard.contrib.torch import from_torch

DEVICES = 8
BATCH, LENGTH, WORDS = 16, 16, 256
KEPT = Path(__file__).parent / "results" / "torch_models.json"

_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_WIDE = {**_SIZES, "intermediate_size": 128}
_GROUPED = {**_WIDE, "num_key_value_heads": 2}
_PAIR = {
    **{"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4},
    **{"decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128},
    **{"max_position_embeddings": 64},
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": _GROUPED,
    "qwen2": _GROUPED,
    "qwen3": {**_GROUPED, "head_dim": 16},
    "mistral": _GROUPED,
    "gemma2": {**_GROUPED, "head_dim": 16},
    "phi": _WIDE,
    "olmo2": _GROUPED,
    "stablelm": _GROUPED,
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": _WIDE,
    "opt": {**_SIZES, "ffn_dim": 128, "word_embed_proj_dim": 64, "max_position_embeddings": 64},
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4},
    "falcon": _SIZES,
    "mamba": {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
    "mixtral": {**_GROUPED, "num_local_experts": 8},
    "qwen3_moe": {
        **_GROUPED, "head_dim": 16, "moe_intermediate_size": 64, "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "olmoe": {**_GROUPED, "num_experts": 8, "num_experts_per_tok": 2},
    "t5": {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4},
    "bart": _PAIR,
    "m2m_100": _PAIR,
}  # fmt: skip
PAIRS = ("t5", "bart", "m2m_100")  # encoder and decoder; NLLB is m2m_100
EXPERTS = ("mixtral", "qwen3_moe", "olmoe")


def model(name: str, **sizes: Any) -> Any:
    """One of the models, with random weights, on torch's default device."""
    config = transformers.AutoConfig.for_model(name, **{"vocab_size": WORDS, **sizes})
    config.use_cache = False
    for token in ("pad", "bos", "eos", "decoder_start"):
        setattr(config, f"{token}_token_id", 0)
    kind = "Seq2SeqLM" if name in PAIRS else "CausalLM"
    options = {"experts_implementation": "grouped_mm"} if name in EXPERTS else {}
    torch.manual_seed(0)
    made = getattr(transformers, f"AutoModelFor{kind}").from_config(config, **options)
    return made.eval()


def training_step(function: Any, annotate: Any = lambda params, ids: (params, ids)) -> Any:
    """A step of gradient descent on the model's own loss."""

    def step(params: Any, ids: Any) -> Any:
        params, ids = annotate(params, ids)
        loss, gradients = jax.value_and_grad(lambda p: function(p, input_ids=ids, labels=ids).loss)(
            params
        )
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), loss

    return step


def data_parallel(params: Any, ids: Any) -> Any:
    return params, gshard.split(ids, 0, DEVICES)


def fully_sharded(params: Any, ids: Any) -> Any:
    return gshard.fsdp(params, DEVICES), gshard.split(ids, 0, DEVICES)


def experts_sharded(params: Any, ids: Any) -> Any:
    """The weights of experts, which have three dims, by expert; all else is data parallel."""
    split = {n: gshard.split(w, 0, DEVICES) if w.ndim == 3 else w for n, w in params.items()}
    return split, gshard.split(ids, 0, DEVICES)


def sent(step: Any, params: Any, ids: Any) -> tuple[Any, int]:
    lowered = gshard.jit(step).lower(params, ids)
    return lowered, sum(c.bytes for c in lowered.collectives)


def versions() -> str:
    """Those that a row was made with."""
    torch_s, hugging = torch.__version__, transformers.__version__
    return f"torch {torch_s}, transformers {hugging}, JAX {jax.__version__}"


def row(name: str, auto_seconds: float) -> dict[str, Any]:
    """What one model shows."""
    module = model(name, **MODELS[name])
    ids = torch.randint(1, WORDS, (BATCH, LENGTH))
    began = time.process_time()
    function, params = from_torch(module, (), {"input_ids": ids, "labels": ids})
    found: dict[str, Any] = {"export": time.process_time() - began, "versions": versions()}
    given = jnp.asarray(ids.numpy(), jnp.int32)
    want = module(input_ids=ids, labels=ids)
    got = jax.jit(function)(params, input_ids=given, labels=given)
    found["logits"] = float(np.abs(got.logits - want.logits.detach().numpy()).max())
    weights = sum(w.nbytes for w in params.values())
    found["bound"] = int(2 * weights * (DEVICES - 1) / DEVICES)
    found["weights"] = sum(w.size for w in params.values())

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, given))
    plain = training_step(function)
    found["equations"] = len(jax.make_jaxpr(plain)(*shapes).eqns)
    lowered, found["data parallel"] = sent(training_step(function, data_parallel), *shapes)
    _, found["fsdp"] = sent(training_step(function, fully_sharded), *shapes)
    if name in EXPERTS:
        lowered, found["experts"] = sent(training_step(function, experts_sharded), *shapes)
        kinds = {c.kind for c in lowered.collectives}
        found["exchanged"] = any("all_to_all" in kind for kind in kinds)
    _, loss = lowered.compile()(params, given)
    _, alone = jax.jit(plain)(params, given)
    found["loss"] = abs(float(loss) - float(alone))
    began = time.process_time()
    layout = gshard.auto(plain, *shapes, devices=DEVICES, hardware="h100", seconds=auto_seconds)
    found["auto"] = time.process_time() - began
    found["auto seconds"], found["auto bound"] = layout.seconds, layout.bound
    return found


_FULL = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
_FULL |= {"num_hidden_layers": 32, "intermediate_size": 14336}
FULL = {
    "llama": {**_FULL, "vocab_size": 128256},  # Llama 3 8B
    "mixtral": {**_FULL, "vocab_size": 32000, "num_local_experts": 8},  # Mixtral 8x7B
}
GPUS, CONTEXT = 64, 4096


def full(name: str, layers: int = 32) -> dict[str, Any]:
    """The forecast of a model of full size, without weights: bfloat16, one row for each GPU.

    Layers are computed again for the gradients (`remat`). Weights are fully sharded; those of
    experts are split by expert over 8 GPUs, and each has 8 copies.
    """
    with torch.device("meta"):
        module = model(name, **{**FULL[name], "num_hidden_layers": layers}).to(torch.bfloat16)
        ids = torch.zeros((GPUS, CONTEXT), dtype=torch.int64)
    inputs = {"input_ids": ids, "labels": ids}
    function, params = from_torch(module, (), inputs, remat=r"model\.layers\.\d+")

    def annotate(params: Any, ids: Any) -> Any:
        split = {
            name: gshard.split(w, 0, 8) if w.ndim == 3 else gshard.fsdp(w, GPUS)
            for name, w in params.items()
        }
        return split, gshard.split(ids, 0, GPUS)

    step = gshard.jit(training_step(function, annotate), devices=GPUS, hardware="h100")
    lowered = step.lower(params, jax.ShapeDtypeStruct((GPUS, CONTEXT), jnp.int32))
    forecast = lowered.forecast()
    return {
        "weights": sum(w.size for w in params.values()),
        "seconds": forecast.step_seconds,
        "memory": forecast.memory_bytes,
        "sent": forecast.sent_bytes,
        "tokens": CONTEXT / forecast.step_seconds,
        "fits": forecast.fits,
    }


def tried(name: str, auto_seconds: float) -> tuple[str, dict[str, Any]]:
    """A model's row; what fails is one too. In a process of its own, or in this one."""
    transformers.logging.set_verbosity_error()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    torch.set_num_threads(1)
    try:
        return name, row(name, auto_seconds)
    except Exception as error:
        return name, {"failed": (str(error).strip() or type(error).__name__).splitlines()[0]}


def all_tried(names: Iterable[str], auto_seconds: float, jobs: int) -> Iterator[Any]:
    """Rows as they are made, in `jobs` processes, those of the largest programs first."""
    if jobs == 1:
        yield from (tried(name, auto_seconds) for name in names)
        return
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, spawn, max_tasks_per_child=1) as pool:
        waiting = [pool.submit(tried, name, auto_seconds) for name in sorted(names, key=_size)]
        yield from (done.result() for done in concurrent.futures.as_completed(waiting))


def _size(name: str) -> bool:
    return name not in (*PAIRS, *EXPERTS, "mamba")


def markdown(rows: dict[str, dict[str, Any]]) -> str:
    """The page."""
    by_versions: dict[str, list[str]] = {}
    for name in MODELS:
        by_versions.setdefault(rows.get(name, {}).get("versions", "fails"), []).append(name)
    most, *others = sorted(by_versions, key=lambda versions: -len(by_versions[versions]))
    made_with = [most, *(f"{', '.join(by_versions[v])}: {v}" for v in others)]
    lines = [
        "# Models of Hugging Face, from PyTorch",
        "",
        "*`benchmarks`: in a checkout of the repository, not in the wheel.*",
        "",
        "Made by `python -m benchmarks.torch_models --out docs/results/torch.md`",
        *textwrap.wrap(f"({'; '.join(made_with)}).", 100),
        f"Models have 2 layers of width 64 and random weights; {BATCH} rows of {LENGTH} tokens, on "
        f"{DEVICES} virtual devices.",
        "",
        "Columns: seconds of one core for `torch.export` and the reading of its program; equations",
        "of a training step; the largest error of the logits against torch; bytes that a device",
        "sends in a data parallel and in a fully sharded (`gshard.fsdp`) step, over the bound, an",
        "AllReduce of all weights, or their AllGather and ReduceScatter; for models with experts",
        "also with experts on devices of their own; the loss over 8 devices less that of one (data",
        "parallel; with experts split, where there are any);",
        "seconds of one core for `gshard.auto` on 8 H100.",
        "",
        "| model | weights | export s | equations | logits | data parallel | FSDP | experts | loss "
        "| auto s |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name in MODELS:
        lines += [_line(name, rows[name])] if name in rows else []
    good = [r for n, r in rows.items() if n in MODELS and "failed" not in r]
    above = [
        f"{name} ({kind}, {r[kind] / r['bound']:.2f})"
        for name, r in rows.items()
        for kind in ("data parallel", "fsdp")
        if r.get(kind, 0) > 1.05 * r.get("bound", 0)
    ]
    lines += ["", f"{len(good)} of {len(MODELS)} models run."]
    lines += [f"Above 1.05 of the bound: {', '.join(above) or 'none'}."]
    return "\n".join([*lines, *_full_sizes(rows)]) + "\n"


def _full_sizes(rows: dict[str, dict[str, Any]]) -> list[str]:
    """The forecasts of full sizes that were made."""
    found = {name: rows[f"full {name}"] for name in FULL if f"full {name}" in rows}
    if not found:
        return []
    lines = [
        "",
        f"## Full sizes, forecast for {GPUS} H100",
        "",
        "By `python -m benchmarks.torch_models --full llama` (Llama 3 8B), `--full mixtral`, from",
        f"meta weights in bfloat16: one row of {CONTEXT:,} tokens for each GPU, layers computed",
        "again for the gradients (`from_torch(..., remat=...)`), `gshard.fsdp`, experts split over",
        "8 GPUs with 8 copies, plain gradient descent, and attention by its scores, without a",
        "fused kernel. Nothing was measured. For comparison, torchtitan's page `performance.md`",
        "reports 5,762 tokens per second and GPU for Llama 3.1 8B with FSDP on 8 H100 (2 rows for",
        "each GPU, selective activation checkpointing, a fused attention and Adam): another",
        "program, and fewer GPUs. Mixtral's rows are exchanged by AllToAll, and then summed over",
        "all GPUs for the gradients of the sort by expert: most of what is sent.",
        "",
        "| model | weights | step | memory | sent by a GPU | tokens per second and GPU |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    return lines + [
        f"| {name} | {r['weights']:,} | {r['seconds']:.2f} s | {r['memory'] / 1e9:.1f} GB"
        f"{'' if r['fits'] else ', does not fit'} | "
        f"{r['sent'] / 1e9:.1f} GB | {r['tokens']:,.0f} |"
        for name, r in found.items()
    ]


def _line(name: str, r: dict[str, Any]) -> str:
    if "failed" in r:
        return f"| {name} | fails: {r['failed']} |" + " |" * 8
    share = {k: f"{r[k] / r['bound']:.2f}" if k in r else "" for k in ("data parallel", "fsdp")}
    experts = f"{r['experts'] / r['bound']:.2f}" if "experts" in r else ""
    experts += ", AllToAll" if r.get("exchanged") else ""
    return (
        f"| {name} | {r['weights']:,} | {r['export']:.1f} | {r['equations']} | {r['logits']:.0e} | "
        f"{share['data parallel']} | {share['fsdp']} | {experts} | {r['loss']:.0e} | "
        f"{r['auto']:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help=f"default: all of {', '.join(MODELS)}")
    parser.add_argument("--auto", type=float, default=20, help="seconds of work for gshard.auto")
    parser.add_argument("--jobs", type=int, default=1, help="how many models at a time")
    parser.add_argument("--full", choices=FULL, help="forecast this model of full size instead")
    parser.add_argument("--table", action="store_true", help="only the page, of rows that are kept")
    parser.add_argument("--out", type=Path, help="also write the page here")
    args = parser.parse_args()
    if unknown := set(args.models) - set(MODELS):
        parser.error(f"no such model: {', '.join(unknown)}; there are {', '.join(MODELS)}")
    rows = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    if args.full:
        transformers.logging.set_verbosity_error()
        rows[f"full {args.full}"] = full(args.full)
        print(rows[f"full {args.full}"])
        KEPT.write_text(json.dumps(rows, indent=1) + "\n")
    asked = () if args.table or args.full else args.models or MODELS
    for name, found in all_tried(asked, args.auto, args.jobs):
        rows[name] = found
        print(_line(name, found), flush=True)
        KEPT.write_text(json.dumps(rows, indent=1) + "\n")
    if args.out:
        args.out.write_text(markdown(rows))


if __name__ == "__main__":
    main()
