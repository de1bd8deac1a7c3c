"""What a release was made from, for programs: `release.json`, beside the card for people."""

from __future__ import annotations

from typing import Any

import gshard
from gshard.mt.errors import UserError
from gshard.mt.evaluation.evaluate import EVALUATION, read_results
from gshard.mt.release.card import licences
from gshard.mt.run import Run

VERSION = 1


def provenance(run: Run, step: int, command: str) -> dict[str, Any]:
    """Licences of the text, directions with their pairs and scores, and the command.

    What is unknown, because the corpus is not here or these weights were not evaluated, is null.
    """
    try:
        corpus = run.corpus
    except UserError:
        corpus = None
    found = read_results(run.folder / EVALUATION)
    scored = found["tasks"] if found is not None and found["checkpoint"] == step else {}
    directions = {}
    for task in run.tokenizer.tasks:
        scores = scored.get(str(task), {})
        directions[str(task)] = {
            "pairs": None if corpus is None else corpus.count(task.foreign),
            "bleu": scores.get("bleu"),
            "chrf": scores.get("chrf"),
        }
    return {
        "version": VERSION,
        "gshard": gshard.__version__,
        "run": run.name,
        "step": step,
        "command": command,
        "licences": None if corpus is None else licences(corpus.manifest),
        "vocabulary": run.tokenizer.digest,
        "directions": directions,
    }
