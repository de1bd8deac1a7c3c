"""Hugging Face's NLLB-MoE at the paper's dims, in PyTorch: the peer that trains on one GPU."""

from __future__ import annotations

import statistics
import time
from typing import Any


def model_of(experts: int) -> Any:
    import torch
    from transformers import NllbMoeConfig, NllbMoeForConditionalGeneration

    config = NllbMoeConfig(
        vocab_size=32_000,
        d_model=1024,
        encoder_layers=6,
        decoder_layers=6,
        encoder_ffn_dim=8192,
        decoder_ffn_dim=8192,
        encoder_attention_heads=16,
        decoder_attention_heads=16,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
        num_experts=experts,
        encoder_sparse_step=2,
        decoder_sparse_step=2,
        second_expert_policy="random",
        max_position_embeddings=512,
        dropout=0.1,
        attention_dropout=0.1,
        attn_implementation="eager",  # the only one that it has
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        return NllbMoeForConditionalGeneration(config)


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """A training step, or a beam search; out of memory is a result."""
    import torch

    try:
        model = model_of(case["experts"])
        weights = sum(p.numel() for p in model.parameters())
        found = _decode(model, case) if "sentences" in case else _train(model, case)
    except torch.cuda.OutOfMemoryError as error:
        return {"error": f"out of memory: {str(error)[:120]}"}
    peak = torch.cuda.max_memory_allocated() / 1e9
    return {"weights": weights, "peak_gb": peak, **found}


def _train(model: Any, case: dict[str, Any]) -> dict[str, Any]:
    import torch

    rows = case["tokens"] // 256
    ids = torch.randint(4, 32_000, (2, rows, 256), device="cuda")
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-3)
    model.train()

    def step() -> None:
        out = model(input_ids=ids[0], attention_mask=torch.ones_like(ids[0]), labels=ids[1])
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    seconds = _seconds(step, warm=2, repeats=4)
    return {"ms": 1e3 * seconds, "source_tokens_per_s": case["tokens"] / seconds}


def _decode(model: Any, case: dict[str, Any]) -> dict[str, Any]:
    import torch

    ids = torch.randint(4, 32_000, (case["sentences"], 32), device="cuda")
    model.eval()
    steps = case.get("steps", 64)

    def search() -> None:
        with torch.inference_mode():
            model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                num_beams=4,
                do_sample=False,
                min_new_tokens=steps,
                max_new_tokens=steps,
            )

    seconds = _seconds(search, warm=1, repeats=2)
    return {
        "steps": steps,
        "ms_a_step": 1e3 * seconds / steps,
        "sentences_per_s": case["sentences"] / seconds,
    }


def _seconds(run: Any, warm: int, repeats: int) -> float:
    import torch

    times = []
    for i in range(warm + repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        if i >= warm:
            times.append(time.perf_counter() - begin)
    return statistics.median(times)
