"""What the losses of a run depend on, bound into its checkpoints.

A checkpoint can only be resumed with the settings, the vocabularies and the text that it was made
with. Otherwise, editing a file between two trainings would silently change the losses.
"""

from __future__ import annotations

import json
from typing import Any

from gshard.mt.config import CHANGEABLE, OptimizerConfig, fall_if_changeable, settings
from gshard.mt.errors import UserError
from gshard.mt.run import Run

_CHECKED_BY_CONTENT = ("data.",)  # where text and vocabularies are does not matter
# What a translation depends on and the shapes of the weights do not tell.
_OF_THE_MODEL = ("model.heads", "model.gating.top_k", "model.gating.second_expert")


def identity(run: Run, teacher: str = "") -> dict[str, Any]:
    """The settings that matter, and checksums of vocabularies, languages' text and the teacher."""
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
    found = {
        "settings": matters,
        "vocabulary": run.tokenizer.digest,
        "text": text,
        "teacher": teacher,
    }
    return dict(json.loads(json.dumps(found)))  # as a checkpoint gives it back


def other_model(note: dict[str, Any], run: Run) -> list[str]:
    """What the weights of a checkpoint do not go with any more, of the model and vocabularies."""
    if "identity" not in note:
        return []
    saved = note["identity"]
    now = {
        "settings": {n: v for n, v, _ in settings(run.config) if n.startswith(_OF_THE_MODEL)},
        "vocabulary": run.tokenizer.digest,
        # Which translating does not depend on:
        "text": saved["text"],
        "teacher": saved.get("teacher", ""),
    }
    return differences(saved, dict(json.loads(json.dumps(now))), note["step"])


def refuse_changes(run: Run, mine: dict[str, Any], note: dict[str, Any] | None) -> None:
    """An error if something that the losses depend on is not as the last checkpoint notes it."""
    if note and (changed := differences(note["identity"], mine, note["step"])):
        lines = "\n  ".join(changed)
        raise UserError(
            f"{run.folder} is not as it was at step {note['step']}:\n  {lines}\n"
            "its losses would differ; restore what changed, or start a new run"
        )


def differences(saved: dict[str, Any], now: dict[str, Any], done: int) -> list[str]:
    """What changed since the checkpoint of step `done`, a line each."""
    before, after = saved["settings"], now["settings"]
    changeable = fall_if_changeable(_rate(before), _rate(after), done)
    # A setting that an older release did not have gets the value of its behaviour.
    lines = [
        f"{name} was {before[name]} and is now {after[name]}"
        for name in sorted(before.keys() & after.keys())
        if before[name] != after[name] and name not in changeable
    ]
    if saved["vocabulary"] != now["vocabulary"]:
        lines.append("the vocabularies are others")
    if saved.get("teacher", "") != now.get("teacher", ""):
        lines.append("the teacher is another one (distill.teacher, distill.checkpoint)")
    old, new = saved["text"], now["text"]
    changed = sorted(name for name in {**old, **new} if old.get(name) != new.get(name))
    if changed:
        lines.append(f"the corpus has other text of {', '.join(changed)}")
    return lines


def _rate(saved: dict[str, Any]) -> OptimizerConfig:
    """How the learning rate falls, of settings as a checkpoint has them."""
    return OptimizerConfig(fall=saved.get("optimizer.fall", 0), end=saved.get("optimizer.end", 0))
