"""Many languages in one model: a Mixture-of-Experts Transformer against a dense one.

Every language maps the same words onto the same words by a dictionary of its own, drawn at random,
so there is nothing to share: 64 languages of 64 words are 4,096 facts to remember. A sentence is
its language's tag and four words, the frequent ones more often; its translation is word for word.

Three models are trained on the same sentences. "moe" has 32 experts per MoE layer, of which a token
uses two; "dense" has in their place one feed-forward layer twice as wide as an expert, which is the
same arithmetic per token; "moe, no aux" is "moe" without the auxiliary loss.

    python examples/moe_languages.py              # a few minutes on 2 cores
    python examples/moe_languages.py --steps 500  # only to see it run
"""

from __future__ import annotations

import argparse
import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import gshard
from gshard.nn import (
    Batch,
    GatingConfig,
    Strategy,
    TrainState,
    TransformerConfig,
    adam,
    eval_step,
    init_state,
    train_step,
)

jit = gshard.jit if hasattr(gshard, "jit") and jax.device_count() > 1 else jax.jit


@dataclass(frozen=True)
class Task:
    """The languages: `dictionaries[l, w]` is what word w means in language l."""

    languages: int = 64
    words: int = 64
    length: int = 4

    @functools.cached_property
    def dictionaries(self) -> np.ndarray:
        rng = np.random.default_rng(0)
        return np.stack([rng.permutation(self.words) for _ in range(self.languages)])

    def batch(self, key: jax.Array, sentences: int) -> Batch:
        """Random sentences; token 0 is padding, then come the words, then the languages' tags."""
        key_language, key_words = jax.random.split(key)
        language = jax.random.randint(key_language, (sentences, 1), 0, self.languages)
        frequency = -0.8 * jnp.log(jnp.arange(1.0, self.words + 1))
        words = jax.random.categorical(key_words, frequency, shape=(sentences, self.length))
        source = jnp.concatenate([1 + self.words + language, 1 + words], axis=1)
        return Batch.of(source, 1 + jnp.asarray(self.dictionaries)[language, words])


def models(
    task: Task, experts: int = 32, hidden: int = 16, dtype: Any = "float32"
) -> dict[str, TransformerConfig]:
    """The three models to compare."""
    moe = TransformerConfig(
        source_vocab=1 + task.words + task.languages,
        target_vocab=1 + task.words,
        encoder_layers=2,
        decoder_layers=2,
        model_dim=32,
        hidden_dim=hidden,
        heads=2,
        key_dim=8,
        value_dim=8,
        experts=experts,
        groups=8,
        input_dropout=0.0,
        residual_dropout=0.0,
        attention_dropout=0.0,
        dtype=dtype,
    )
    return {
        "moe": moe,
        "dense": replace(moe, experts=0, expert_hidden_dim=2 * hidden),
        "moe, no aux": replace(moe, gating=GatingConfig(aux_coefficient=0.0)),
    }


def train(
    config: TransformerConfig,
    task: Task,
    steps: int,
    sentences: int = 256,
    seed: int = 0,
    report: Any = lambda done, metrics: None,
) -> dict[str, float]:
    """Train one model and say how it does on new sentences."""
    strategy = Strategy(jax.device_count())
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, min(200, steps // 5), steps, 1e-5)
    optimizer = adam(schedule)
    start_key, data_key, step_key, test_key = jax.random.split(jax.random.key(seed), 4)
    state = jit(functools.partial(init_state, config, optimizer, strategy=strategy))(start_key)

    def steps_of(state: TrainState, batches: Batch) -> tuple[TrainState, Any]:
        def one(state: TrainState, batch: Batch) -> tuple[TrainState, Any]:
            return train_step(state, batch, step_key, optimizer=optimizer, strategy=strategy)

        return jax.lax.scan(one, state, batches)

    chunk = min(25, steps)
    run = jit(steps_of)
    draw = jax.jit(jax.vmap(lambda key: task.batch(key, sentences)))
    bad = 0
    for begin in range(0, steps - steps % chunk, chunk):
        keys = jax.random.split(jax.random.fold_in(data_key, begin), chunk)
        state, metrics = run(state, draw(keys))
        bad += int(np.sum(~np.isfinite(np.asarray(metrics.loss))))
        report(begin + chunk, metrics)

    test = jax.tree.map(lambda x: x[0], draw(test_key[None]))
    final = jit(functools.partial(eval_step, strategy=strategy))(state.model, test)
    result = {"loss": float(final.nll), "not finite": float(bad)}
    if final.encoder is not None and final.decoder is not None:
        load = np.concatenate([np.asarray(final.encoder.load), np.asarray(final.decoder.load)])
        result["busiest"] = float(load.max() * config.experts)
        dead = np.concatenate([final.encoder.dead_experts, final.decoder.dead_experts])
        result["dead"] = float(dead.sum())
        lost = np.concatenate([metrics.encoder.overflow_first, metrics.decoder.overflow_first], 1)
        result["overflow"] = float(lost[-1].mean())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args()
    task = Task()
    console = Console()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(),
    )
    results = {}
    with Progress(*columns, console=console) as progress:
        for name, config in models(task, options.experts, dtype=options.dtype).items():
            bar = progress.add_task(f"{name:12}", total=options.steps, status="compiling")

            def report(done: int, metrics: Any, bar: Any = bar) -> None:
                loss = float(np.mean(metrics.nll))
                progress.update(bar, completed=done, status=f"loss {loss:.3f}")

            results[name] = train(config, task, options.steps, seed=options.seed, report=report)

    table = Table("model", "loss", "busiest expert", "experts without tokens", "first choices lost")
    for name, r in results.items():
        routed = "dead" in r
        table.add_row(
            name,
            f"{r['loss']:.3f}",
            f"{r['busiest']:.1f} x its share" if routed else "",
            f"{r['dead']:.0f} of {2 * options.experts}" if routed else "",
            f"{100 * r['overflow']:.0f}%" if routed else "",
        )
    console.print(table)
    console.print(f"guessing among {task.words} words would be {np.log(task.words):.2f} at most")


if __name__ == "__main__":
    main()
