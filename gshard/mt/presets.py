"""The runs that have a name: small ones for a laptop and a GPU, and the paper's models.

`tiny` is what eight virtual devices on a laptop train in minutes; `dense` is its equal in
arithmetic per token without experts (two choices of experts are one layer twice as wide).
`many-to-one` is what experts gain most with where all text is translated into one language.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from gshard.errors import UserError, nearest
from gshard.mt.batching.batches import BatchConfig
from gshard.mt.batching.tokenizer import VocabularyConfig
from gshard.mt.config import OptimizerConfig, RunConfig, TrainConfig, read
from gshard.nn.config import GatingConfig, TransformerConfig
from gshard.nn.family import FAMILY, Model


def _model(
    layers: int, dim: int, hidden: int, experts: int, dropout: float, dtype: str = "float32"
) -> TransformerConfig:
    heads = max(4, dim // 64)
    return TransformerConfig(
        source_vocab=0,
        target_vocab=0,
        encoder_layers=layers,
        decoder_layers=layers,
        model_dim=dim,
        hidden_dim=hidden,
        heads=heads,
        key_dim=dim // heads,
        value_dim=dim // heads,
        experts=experts,
        groups=8,
        gating=GatingConfig(min_capacity=4),
        input_dropout=dropout,
        residual_dropout=dropout,
        attention_dropout=0.0,  # its random numbers would take a fifth of a step on a CPU
        dtype=dtype,  # type: ignore[arg-type]
    )


_TINY = RunConfig(
    name="tiny",
    model=_model(2, 128, 512, 8, 0.1),
    vocabulary=VocabularyConfig(4_000, 2_000, sentences=60_000),
    batch=BatchConfig(16, 64, 40, temperature=2.0),
    optimizer=OptimizerConfig(learning_rate=0.7, warmup=200, rise=200),
    train=TrainConfig(steps=2_000, save_every=200, log_every=10),
)


def _dense(config: RunConfig) -> RunConfig:
    """The same run without experts: every second layer has one feed-forward twice as wide."""
    hidden = 2 * (config.model.expert_hidden_dim or config.model.hidden_dim)
    model = dataclasses.replace(config.model, experts=0, expert_hidden_dim=hidden, groups=None)
    return dataclasses.replace(config, name="dense", model=model)


_SMALL = RunConfig(
    name="small",
    model=_model(4, 256, 1024, 16, 0.1),
    vocabulary=VocabularyConfig(16_000, 8_000),
    batch=BatchConfig(64, 96, 64),
    optimizer=OptimizerConfig(learning_rate=1.0, warmup=1_000, rise=1_000),
    train=TrainConfig(steps=20_000, save_every=500),
)

_BASE = RunConfig(
    name="base",
    model=_model(6, 512, 2048, 32, 0.1, "bfloat16"),
    vocabulary=VocabularyConfig(32_000, 16_000),
    batch=BatchConfig(256, 128, 80),
    optimizer=OptimizerConfig(learning_rate=1.0, warmup=2_000, rise=2_000),
    train=TrainConfig(steps=100_000, save_every=2_000, log_every=50),
)

# The family of docs/results/figure.md: many languages are read and one is written.
_MANY_TO_ONE = RunConfig(
    name="many-to-one",
    model=dataclasses.replace(
        _model(4, 256, 1024, 32, 0.1, "bfloat16"), decoder_layers=2, experts_in="encoder"
    ),
    vocabulary=VocabularyConfig(24_000, 8_000, sentences=300_000),
    batch=BatchConfig(512, 128, 80, temperature=5.0),
    optimizer=OptimizerConfig(learning_rate=1.5, warmup=1_000, rise=500, fall=720, end=1_800),
    train=TrainConfig(steps=1_800, save_every=900, log_every=20),
)


def _of_family(model: Model) -> RunConfig:
    """One of the paper's models with the paper's batch and optimizer."""
    c = model.config
    return RunConfig(
        name=model.name,
        model=dataclasses.replace(c, source_vocab=0, target_vocab=0),
        vocabulary=VocabularyConfig(c.source_vocab, c.target_vocab, sentences=10_000_000),
        batch=BatchConfig(model.batch_tokens // model.length, model.length, model.length),
        train=TrainConfig(steps=1_000_000, save_every=5_000, log_every=100),
    )


PRESETS: dict[str, RunConfig] = {
    **{name: _of_family(model) for name, model in FAMILY.items() if model.devices > 8},
    **{config.name: config for config in (_TINY, _dense(_TINY), _SMALL, _BASE, _MANY_TO_ONE)},
}


def preset_or_file(name: str, folder: Path = Path()) -> RunConfig:
    """A preset, even if a file has its name, or the configuration in a file of a folder."""
    if name not in PRESETS and (folder / name).is_file():
        return read(folder / name)
    return preset(name)


def preset(name: str) -> RunConfig:
    """The configuration of that name."""
    if name not in PRESETS:
        raise UserError(
            f"{name!r} is neither a run's folder, nor a configuration file, nor one of "
            f"{', '.join(PRESETS)}{nearest(name, PRESETS)}"
        )
    return PRESETS[name]
