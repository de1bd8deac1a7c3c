"""The runs that have a name: those of `presets.toml`, and the paper's models."""

from __future__ import annotations

import dataclasses
import tomllib
from importlib import resources
from pathlib import Path

from gshard.errors import UserError, nearest
from gshard.mt.batching.batches import BatchConfig
from gshard.mt.batching.tokenizer import VocabularyConfig
from gshard.mt.config import RunConfig, TrainConfig, from_json, read
from gshard.nn.family import FAMILY, Model


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


def _written() -> dict[str, RunConfig]:
    """The presets of the file, by name."""
    text = (resources.files("gshard.mt") / "presets.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    usual = tables.pop("usual")["model"]
    return {
        name: from_json({**table, "name": name, "model": {**usual, **table["model"]}})
        for name, table in tables.items()
    }


PRESETS: dict[str, RunConfig] = {
    **{name: _of_family(model) for name, model in FAMILY.items() if model.devices > 8},
    **_written(),
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
