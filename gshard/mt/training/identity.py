"""What the losses of a run depend on, bound into its checkpoints.

A checkpoint goes on only with the settings, the vocabularies and the text that it was made with.
Whoever edited a file between two stretches of training would otherwise get other losses without a
word.
"""

from __future__ import annotations

import json
from typing import Any

from gshard.mt.config import CHANGEABLE, settings
from gshard.mt.run import Run

_CHECKED_BY_CONTENT = ("data.",)  # where text and vocabularies are does not matter


def identity(run: Run) -> dict[str, Any]:
    """The settings that matter, and checksums of the vocabularies and of each language's text."""
    matters = {
        name: value
        for name, value, _ in settings(run.config)
        if not name.startswith((*CHANGEABLE, *_CHECKED_BY_CONTENT))
    }
    languages = run.corpus.manifest["languages"]
    text = {
        language: {
            split: languages[language][split]["sha256"]
            for split in ("train", "dev")
            if split in languages.get(language, {})
        }
        for language in sorted({task.foreign for task in run.tokenizer.tasks})
    }
    found = {"settings": matters, "vocabulary": run.tokenizer.digest, "text": text}
    return dict(json.loads(json.dumps(found)))  # as a checkpoint gives it back


def differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What changed since a checkpoint was made, a line each."""
    before, after = saved["settings"], now["settings"]
    # A setting that an older release did not have stands for what it did.
    lines = [
        f"{name} was {before[name]} and is now {after[name]}"
        for name in sorted(before.keys() & after.keys())
        if before[name] != after[name]
    ]
    if saved["vocabulary"] != now["vocabulary"]:
        lines.append("the vocabularies are others")
    old, new = saved["text"], now["text"]
    changed = sorted(name for name in {**old, **new} if old.get(name) != new.get(name))
    if changed:
        lines.append(f"the corpus has other text of {', '.join(changed)}")
    return lines
