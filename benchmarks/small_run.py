"""A small run on made-up text, for benchmarks that need a model and no quality."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

SAVE_EVERY = 3  # steps


def words(n: int, language: str) -> str:
    """A made-up sentence, other words in every language."""
    draw = random.Random(f"{language} {n % 9973}")
    letters = "aeiou" if language == "en" else "äöüyé"
    return " ".join(
        "".join(draw.choice("bdfgklmnprst") + draw.choice(letters) for _ in range(2))
        for _ in range(6)
    )


def prepare(
    folder: Path,
    steps: int,
    devices: int,
    languages: Sequence[str] = ("de",),
    changes: Sequence[str] = (),
) -> Path:
    """A corpus, a vocabulary and a configuration, in `folder`."""
    path = folder / "config.json"
    if path.exists():
        return path
    from gshard.mt import config as configs
    from gshard.mt.data.gather import GatherConfig, gather
    from gshard.mt.data.splits import HeldOutShares
    from gshard.mt.data.user_text import parse_own
    from gshard.mt.presets import preset
    from gshard.mt.run import Run

    lines = (
        f"{language}\t{words(n, language)}\t{words(n, 'en')}\n"
        for language in languages
        for n in range(800)
    )
    (folder / "text.tsv").write_text("".join(lines), encoding="utf-8")
    own = (parse_own("tsv", str(folder / "text.tsv"), clean=False),)
    gather(GatherConfig(folder / "corpus", own=own, shares=HeldOutShares(0.02, 0.02), jobs=1))
    settings = {
        "model.model_dim": 16,
        "model.hidden_dim": 32,
        "model.heads": 2,
        "model.key_dim": 8,
        "model.value_dim": 8,
        "model.experts": 4,
        "model.groups": 4,
        "batch.source_length": 32,
        "batch.target_length": 32,
        "vocabulary.source_size": 400,
        "vocabulary.target_size": 400,
        "batch.rows": 8,
        "train.steps": steps,
        "train.save_every": SAVE_EVERY,
        "train.log_every": 1,
        "train.keep": 4,
        "train.dev_batches": 1,
        "devices.count": devices,
        "data.corpus": folder / "corpus",
    }
    config = configs.override(
        preset("tiny"), [*(f"{name}={value}" for name, value in settings.items()), *changes]
    )
    run = Run.create(folder / "prepared", config)
    run.make_vocabulary()
    made = f"data.vocabulary={run.folder / 'vocabulary'}"
    path.write_text(json.dumps(configs.to_json(configs.override(config, [made]))))
    return path
