"""Checks of a release before its weights are used: unchanged files, and valid contents.

Checksums detect damage and edits. They are not signatures: whoever changes a release can update
them, so names, shapes and values are checked too.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from gshard.mt import atomic
from gshard.mt.batching.tokenizer import FILES
from gshard.mt.errors import UserError
from gshard.mt.run import CONFIG, Run
from gshard.mt.training import checksums
from gshard.mt.training.weights import WEIGHTS, WeightsFile
from gshard.nn.shapes import weight_shapes

VOCABULARY = "vocabulary"
# What translations depend on; the card beside them may be edited.
VERIFIED = (WEIGHTS, CONFIG, *(f"{VOCABULARY}/{name}" for name in FILES))
DETECTOR = "detector.safetensors"  # of languages, by their n-grams
MADE = "release.json"  # what the release was made from, for programs
_LATER = (DETECTOR, MADE)  # which releases of earlier versions have not


def verified_in(folder: Path) -> tuple[str, ...]:
    """The files of a release whose checksums are written, and compared when it is loaded."""
    listed = atomic.known_object(folder / checksums.FILE) or {}  # damage is told elsewhere
    later = (name for name in _LATER if name in listed or (folder / name).exists())
    return (*VERIFIED, *later)


def is_release(run: Run) -> bool:
    """Whether a folder is a release, and not a run with checkpoints."""
    return any((run.folder / name).is_file() for name in (WEIGHTS, checksums.FILE))


def has_checksums(run: Run) -> bool:
    """Whether it was made by a version that writes them."""
    return (run.folder / checksums.FILE).exists()


def problem(run: Run, *, values: bool = True) -> str:
    """What is wrong with a release of the model that its configuration describes, or "".

    Without `values`, whoever reads the weights has to look whether they are finite.
    """
    if has_checksums(run) and (found := checksums.problem_of(run.folder, verified_in(run.folder))):
        return f"{run.folder} is damaged: {found}"
    path = run.folder / WEIGHTS
    try:
        weights = WeightsFile(path)
    except UserError as error:
        return str(error)
    if weights.shapes != weight_shapes(run.model_config):
        return f"{path} holds the weights of another model than {run.folder} describes"
    if values and (name := weights.not_finite()):
        return not_finite(run, name)
    step = weights.note.get("step", "0")
    return "" if re.fullmatch("[0-9]{1,18}", step) else f"{path} is damaged: its step is {step!r}"


def not_finite(run: Run, name: str) -> str:
    """A sentence about a weight."""
    return f"{run.folder / WEIGHTS} is damaged: {name} holds values that are not finite"


def opened(run: Run, which: str) -> int:
    """The step of a release that is intact, apart from the values of its weights; else an error."""
    if why := problem(run, values=False):
        raise UserError(why)
    if not has_checksums(run):
        print(f"gshard: {unverifiable(run)}", file=sys.stderr)
    return step_of(run, which)


def step_of(run: Run, which: str) -> int:
    """The step of a release; an error if `which` names another."""
    step = int(WeightsFile(run.folder / WEIGHTS).note.get("step", "0"))
    if which not in ("best", "last", str(step)):
        raise UserError(
            f"no checkpoint {which!r} in {run.folder}: it is the release of step {step}"
        )
    return step


def unverifiable(run: Run) -> str:
    """A sentence about a release that an earlier version made."""
    return (
        f"{run.folder} has no {checksums.FILE}, as releases of earlier versions: its weights are "
        "finite and of the right shapes, but whether they are those that were released is unknown"
    )
