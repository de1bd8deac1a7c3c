"""Tables and plots from the results of `benchmarks.speed_gpu`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

Results = list[dict[str, Any]]
BANDWIDTH = 4.3e12  # bytes a second that a copy moves on an H200, read and written
PEAK = 989e12  # operations a second in bfloat16, by its datasheet
PARTS = 6  # stretches of a loss curve that stand in its table


def table(heads: list[str], rows: list[list[str]]) -> str:
    """Text in columns, as Markdown."""
    lines = [heads, ["---"] + ["---:"] * (len(heads) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def training(results: Results) -> str:
    """A row for each training case, ours and the peer's."""
    rows = []
    for r in results:
        if r["module"] not in ("train", "text", "peer") or "sentences" in r:
            continue
        who = "HF NLLB-MoE" if r["module"] == "peer" else "gshard"
        name = f"{who}, {r.get('name', '')}".rstrip(", ")
        if "ms" not in r:
            rows.append([name, str(r["experts"]), f"{r['tokens']:,}", _error(r), *[""] * 6])
            continue
        rows.append(
            [
                name,
                str(r["experts"]),
                f"{r['tokens']:,}",
                f"{r['ms']:.1f}",
                f"{r['source_tokens_per_s']:,.0f}",
                f"{r['target_tokens_per_s']:,.0f}" if "target_tokens_per_s" in r else "",
                f"{100 * r['share']:.1f}%" if "share" in r else "",
                f"{100 * r['share_without_padding']:.1f}%" if "share" in r else "",
                f"{r['peak_gb']:.0f}" if "peak_gb" in r else "",
                f"{r['compile_s']:.0f}" if "compile_s" in r else "",
            ]
        )
    heads = ["training step", "experts", "source tokens", "ms", "source tokens/s"]
    heads += ["target tokens/s", "share of 989", "padding not counted", "GB", "compile s"]
    return table(heads, rows)


def waiting(results: Results) -> str:
    """A line for each step on real text: what part of its time was spent on waiting for batches."""
    shares = [r["data_wait"] for r in results if "data_wait" in r]
    return "\n".join(
        f"Waiting for batches took {100 * share:.1f}% of the time." for share in shares
    )


def spent(results: Results) -> str:
    """A line for each step and each search that was profiled: where its time went."""
    lines = []
    for r in results:
        kinds = r.get("kinds_ms_a_step") or r.get("kinds_ms") or {}
        if kinds:
            whole = r.get("ms_a_step", r.get("ms"))
            parts = ", ".join(f"{kind} {ms:.2f}" for kind, ms in kinds.items())
            lines.append(
                f"{r['module']}, {r['experts']} experts: {whole:.2f} ms, of these {parts}."
            )
    return "\n".join(lines)


def compiling(results: Results) -> str:
    """A row for each fresh process that made the training step ready."""
    parts = ("trace_s", "lower_s", "compile_s", "ready_s")
    rows = [
        [r["name"], *(f"{r[part]:.1f}" if part in r else _error(r) for part in parts)]
        for r in results
        if r["module"] == "compiling"
    ]
    heads = ["seconds in a fresh process", "trace", "lower", "compile or find", "together"]
    return table(heads, rows) if rows else ""


def curves(result: dict[str, Any]) -> str:
    """Mean losses over stretches of one training, in each way; of several seeds their mean."""
    if "curves" not in result:
        return f"curves: {_error(result)}"
    window = result["steps"] // PARTS
    rows = [
        [
            name,
            *(f"{mean:.3f}" for mean in smooth(way["nll"], window)),
            f"{way['seconds']:.0f}",
            *_seeds(way),
        ]
        for name, way in result["curves"].items()
    ]
    heads = [f"to step {window * (i + 1)}" for i in range(PARTS)]
    several = ["each seed at the end"] if any(map(_seeds, result["curves"].values())) else []
    return table(["weights", *heads, "seconds", *several], rows)


def _seeds(way: dict[str, Any]) -> list[str]:
    """The loss that each of several seeds ends with."""
    ends = way.get("ends", [])
    return [", ".join(f"{end:.3f}" for end in ends)] if len(ends) > 1 else []


def decoding(results: Results) -> str:
    """A row for each search, ours and the peer's."""
    rows = []
    for r in results:
        if "sentences" not in r:
            continue
        name = "gshard" if r["module"] == "decode" else "HF generate"
        name += f", {r['name']}" if "name" in r else ""
        if "ms_a_step" not in r:
            rows.append([name, str(r["experts"]), str(r["sentences"]), _error(r), ""])
            continue
        numbers = [f"{r['ms_a_step']:.2f}", f"{r['sentences_per_s']:,.0f}"]
        rows.append([name, str(r["experts"]), str(r["sentences"]), *numbers])
    return table(["beam 4, 64 steps", "experts", "sentences", "ms a step", "sentences/s"], rows)


def floors(result: dict[str, Any]) -> str:
    """Where a step's time went, beside the least that each part could take."""
    tokens, weights = result["tokens"], result["weights"]
    products = 1e15 * result["tflop"] / PEAK
    # Weights are bfloat16. The gradient is read three times, the weight twice, and written once.
    optimizer = 1e3 * 6 * 2 * weights / BANDWIDTH
    # 18 attentions: q, k, v, out and their gradients, of 16 heads of 128.
    attention = 1e3 * 18 * 13 * tokens * 2048 * 2 / BANDWIDTH
    loss = 1e3 * tokens * 32_000 * (4 + 2) / BANDWIDTH  # float32 logits in, bfloat16 gradients out
    known = {"matrix products": products, "attention": attention, "loss": loss}
    rows = [
        [kind, f"{ms:.1f}", f"{known[kind]:.1f}" if kind in known else ""]
        for kind, ms in result["kinds_ms"].items()
    ]
    rows.append(["all", f"{result['ms']:.1f}", f"{products + optimizer + attention + loss:.1f}"])
    note = f"\nOf element-wise and reductions, Adafactor's floor is {optimizer:.1f} ms (bytes).\n"
    return table(["kernels", "ms a step", "floor, ms"], rows) + note


def attention(result: dict[str, Any]) -> str:
    """A row for each way to attend."""
    rows = []
    for name, found in result.items():
        if isinstance(found, dict) and "ms" in found:
            rows.append([name, f"{found['forward_ms']:.2f}", f"{found['ms']:.2f}"])
        elif isinstance(found, dict) and "error" in found:
            rows.append([name, "", _error(found)])
    return table(["one attention, 65,536 tokens", "forward, ms", "with gradients, ms"], rows)


def eight_bits(results: Results) -> str:
    """How much faster the model is with products in float8."""
    speeds = {r.get("name"): r["source_tokens_per_s"] for r in results if "tflop" in r}
    if not {"bfloat16", "float8"} <= speeds.keys():
        return ""
    ratio = speeds["float8"] / speeds["bfloat16"]
    return f"float8: {ratio:.2f} times the tokens/s of bfloat16"


def report(results: Results) -> str:
    """All tables."""
    parts = [training(results), waiting(results), decoding(results), spent(results)]
    parts += [eight_bits(results)]
    parts += [compiling(results)]
    parts += [curves(r) for r in results if r["module"] == "curve"]
    profiled = [r for r in results if r["module"] == "train" and "kinds_ms" in r]
    parts += [floors(r) for r in profiled[:1]]
    parts += [attention(r) for r in results if r["module"] == "attention"]
    return "\n\n".join(part for part in parts if part)


def plots(results: Results, folder: Path) -> None:
    """Tokens/s and share of peak against experts; the step's parts against their floors."""
    import matplotlib.pyplot as plt

    grown = [r for r in results if r.get("name") == "growth" and "ms" in r]
    if grown:
        figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
        experts = [r["experts"] for r in grown]
        axes[0].plot(experts, [r["source_tokens_per_s"] / 1e3 for r in grown], "o-", label="gshard")
        peers = [r for r in results if r["module"] == "peer" and "source_tokens_per_s" in r]
        if peers:
            speeds = [r["source_tokens_per_s"] / 1e3 for r in peers]
            axes[0].plot([r["experts"] for r in peers], speeds, "s", label="HF NLLB-MoE")
        axes[0].set(ylabel="thousand source tokens/s", ylim=(0, None))
        axes[1].plot(experts, [100 * r["share"] for r in grown], "o-")
        axes[1].axhline(50, color="gray", linestyle=":")
        axes[1].set(ylabel="% of 989 TFLOP/s", ylim=(0, 70))
        for ax in axes:
            ax.set_xscale("log", base=2)
            ax.set_xticks(experts, [str(e) for e in experts])
            ax.set_xlabel("experts")
        axes[0].legend()
        figure.savefig(folder / "speed_experts.svg")
    for r in results:
        if r["module"] == "train" and "kinds_ms" in r:
            figure, ax = plt.subplots(figsize=(7, 2.4), layout="constrained")
            kinds = list(r["kinds_ms"])
            ax.barh(kinds[::-1], [r["kinds_ms"][k] for k in kinds[::-1]])
            products = 1e15 * r["tflop"] / PEAK
            ax.axvline(products, color="black", linestyle=":", label="floor of the products")
            ax.set(xlabel=f"ms of a step of {r['ms']:.0f}")
            ax.legend()
            figure.savefig(folder / "speed_breakdown.svg")
            break
    for r in results:
        if "curves" in r:
            figure, ax = plt.subplots(figsize=(6, 3.2), layout="constrained")
            for name, way in r["curves"].items():
                window = max(1, r["steps"] // 60)
                means = smooth(way["nll"], window)
                ax.plot(window * np.arange(1, len(means) + 1), means, label=name)
            ax.set(xlabel="step", ylabel="loss per target token")
            ax.legend()
            figure.savefig(folder / "speed_curves.svg")


def smooth(losses: list[float], window: int) -> list[float]:
    """Means over windows of so many steps, which follow one another."""
    whole = len(losses) // window * window
    return [float(mean) for mean in np.reshape(losses[:whole], (-1, window)).mean(axis=1)]


def _error(result: dict[str, Any]) -> str:
    return result.get("error", "no result").strip().splitlines()[-1][:60]
