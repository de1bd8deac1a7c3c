"""Checkpoints by Orbax: asynchronous, each host writing its own shards, complete or absent.

Weights and optimizer state are saved under their logical names and shapes, whatever devices held
them, so that they can be restored on another number of devices and under other annotations. Every
file has a checksum; a checkpoint with a file that differs is named and passed over.
"""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

from gshard.errors import UserError, nearest
from gshard.mt import atomic, hosts
from gshard.mt.run import ID
from gshard.mt.training import agreement
from gshard.mt.training.weights import damage, named, unnamed, write_checksums

FOLDER = "checkpoints"
_ITEMS = ("model", "optimizer", "note")
_FULL = ("No space left", "ENOSPC", "Disk quota", "RESOURCE_EXHAUSTED")
_ROOM = 1 << 16  # bytes that have to be free for a save to begin
_DISK = ("Read-only file system", "Permission denied", "Input/output error", "File too large")

# Orbax tells of every step it takes, errors of its threads included; what matters is raised.
logging.getLogger("absl").setLevel(logging.CRITICAL)


class Checkpoints:
    """The checkpoints of a run: the newest few, and the best by the loss on dev text."""

    def __init__(self, folder: Path, keep: int = 2, *, read_only: bool = False):
        self.folder = (folder / FOLDER).absolute()
        handlers = {
            "model": ocp.StandardCheckpointHandler(),
            "optimizer": ocp.StandardCheckpointHandler(),
            "note": ocp.JsonCheckpointHandler(),
        }
        policy = preservation_policy.AnyPreservationPolicy(
            [
                preservation_policy.LatestN(keep),
                preservation_policy.BestN(get_metric_fn=_loss, reverse=True, n=1),
            ]
        )
        if read_only and not self.folder.is_dir():
            raise UserError(f"{folder} has no checkpoints yet; `gshard train {folder}` makes some")

        def manager() -> ocp.CheckpointManager:
            options = ocp.CheckpointManagerOptions(
                preservation_policy=policy,
                best_fn=_loss,
                best_mode="min",
                cleanup_tmp_directories=not read_only,
                read_only=read_only,
                create=not read_only,
                # Called when all files are there, before they get the checkpoint's name.
                async_options=ocp.AsyncOptions(
                    post_finalization_callback=self._add_checksums,
                    barrier_sync_fn=agreement.wait_in_save,
                ),
            )
            return ocp.CheckpointManager(
                self.folder, item_names=_ITEMS, item_handlers=handlers, options=options
            )

        self._run = id_of(folder)
        self.damaged = self._set_aside(read_only)  # a line about each
        self._open = manager
        self._manager = manager()
        self.saving, self._began = 0, 0.0  # the step that is being written, and since when
        self.took = 0.0  # seconds, the last save in the background; known to process 0

    @property
    def steps(self) -> list[int]:
        """The steps whose checkpoints are complete, in order."""
        return sorted(self._manager.all_steps())

    def newest_whole(self) -> int:
        """The newest step all of whose files are as they were written; 0 if there is none."""
        for step in reversed(self.steps):
            with contextlib.suppress(DamagedError):
                self._verify(step, _ITEMS)
                return step
        return 0

    def best(self) -> int:
        """The step with the lowest loss on dev text."""
        return int(self._manager.best_step() or self.steps[-1])

    def chosen(self, which: str) -> int:
        """The step that "best", "last" or a number names."""
        folder, steps = self.folder.parent, self.steps
        if not steps:
            raise UserError(
                f"{folder} has no complete checkpoint yet; `gshard train {folder}` makes some"
            )
        if which == "best":
            return self.best()
        if which == "last":
            return steps[-1]
        if which in map(str, steps):
            return int(which)
        known = ("best", "last", "untrained", *map(str, steps))
        there = f"there are {', '.join(known)}{nearest(which, known)}"
        raise UserError(f"no checkpoint {which!r} in {folder}; {there}")

    def save(
        self, step: int, model: Any, optimizer: Any, note: dict[str, Any], dev_nll: float
    ) -> None:
        """Begin to save; the arrays may be donated as soon as this returns.

        A `SaveError`, here or from `wait`, leaves the checkpoints before as they are; saving can
        be tried again.
        """
        self.wait()
        if why := hosts.told_by_any(self._no_room()):
            raise self._save_error(step, why)
        self.saving, self._began = step, time.monotonic()
        mine = {"run": self._run} if self._run else {}
        try:
            if step in self.steps:  # a damaged one, which training has passed over
                self._manager.delete(step)
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    model=ocp.args.StandardSave(named(model)),
                    optimizer=ocp.args.StandardSave(named(optimizer)),
                    note=ocp.args.JsonSave({**note, **mine, "step": step}),
                ),
                metrics={"nll": dev_nll},
                force=True,
            )
        except Exception as error:
            if why := _refusal(error):
                raise self._given_up(step, why) from error
            raise

    def wait(self) -> None:
        """Until everything is on disk; what went wrong in the background is raised here.

        All hosts wait at the same step, and what went wrong on one of them is raised on all.
        """
        if not self.saving:
            return
        problem = None
        try:
            self._manager.wait_until_finished()
        except Exception as error:  # Orbax and TensorStore raise all kinds
            problem = error
        if why := hosts.told_by_any(_refusal(problem)):
            raise self._given_up(self.saving, why) from problem
        if problem:
            raise problem
        self.saving = 0

    def check(self) -> None:
        """Raise what went wrong in the background, if that is known already.

        Several hosts have to wait at the same step, which is when the next save begins.
        """
        if self.saving and jax.process_count() == 1 and not self._manager.is_saving_in_progress():
            self.wait()

    def forget_after(self, step: int) -> None:
        """Remove all checkpoints of later steps."""
        for later in [s for s in self.steps if s > step]:
            self._manager.delete(later)

    def close(self) -> None:
        """Finish writing and let go."""
        with contextlib.suppress(Exception):  # reported by `wait`, or irrelevant by now
            self._manager.close()

    def restore_newest(
        self, model: Any, optimizer: Any
    ) -> tuple[Any, Any, dict[str, Any], list[str]] | None:
        """The newest complete checkpoint, as trees like those given (shapes with shardings).

        Returns the trees, the note, and a line about each newer checkpoint that is damaged.
        """
        damaged = list(self.damaged)
        for step in reversed(self.steps):
            try:
                return (*self.restore(step, model, optimizer), damaged)
            except DamagedError as error:
                damaged.append(str(error))
        if damaged:
            raise UserError("\n".join([*damaged, "no complete checkpoint is left"]))
        return None

    def newest_note(self) -> dict[str, Any] | None:
        """The note of the newest checkpoint that has one."""
        for step in reversed(self.steps):
            with contextlib.suppress(DamagedError):
                return dict(self.restore_some(step, {})["note"])
        return None

    def restore(self, step: int, model: Any, optimizer: Any) -> tuple[Any, Any, dict[str, Any]]:
        """The checkpoint of one step."""
        found = self.restore_some(step, {"model": model, "optimizer": optimizer})
        return found["model"], found["optimizer"], found["note"]

    def restore_some(self, step: int, trees: dict[str, Any]) -> dict[str, Any]:
        """Some of the `model` and the `optimizer` of one step, and the note."""
        wanted = {name: named(tree) for name, tree in trees.items()}
        self._verify(step, (*wanted, "note"))
        self._check(step, wanted)
        args: dict[str, Any] = {n: ocp.args.StandardRestore(tree) for n, tree in wanted.items()}
        try:
            found = self._manager.restore(
                step, args=ocp.args.Composite(**args, note=ocp.args.JsonRestore())
            )
        except Exception as error:  # Orbax and TensorStore raise all kinds
            raise DamagedError(self._about(step, str(error) or repr(error))) from error
        restored = {n: unnamed(found[n], tree) for n, tree in trees.items()}
        return {**restored, "note": found["note"]}

    def _set_aside(self, read_only: bool) -> list[str]:
        """Move away what Orbax would list as checkpoints and fail at, or take for another step."""
        found, foreign = {}, ""
        there = self.folder.iterdir() if hosts.is_first() and self.folder.is_dir() else ()
        for folder in sorted(path for path in there if path.name.isascii()):
            if not folder.name.isdigit():
                continue
            if problem := _problem(folder):
                found[folder] = self._about(folder.name, problem)
            elif (run := str(_note(folder).get("run", ""))) != self._run:
                foreign = (
                    f"{folder} is a checkpoint of another run: its id is {run[:40] or 'none'}, and "
                    f"this run's is {self._run or 'none'}; move it out of {self.folder}"
                )
        if why := hosts.told_by_any(foreign):
            raise UserError(why)
        if read_only and (why := hosts.told_by_any(next(iter(found.values()), ""))):
            raise DamagedError(f"{why}; `gshard train {self.folder.parent}` sets it aside")
        lines = []
        for folder, about in found.items():
            place = self.folder.parent / "damaged" / f"{folder.name}-{time.time_ns()}"
            place.parent.mkdir(exist_ok=True)
            folder.rename(place)
            lines.append(f"{about} (it is in {place} now)")
        hosts.wait_for_all("damaged checkpoints")
        return lines

    def _verify(self, step: int, items: Sequence[str]) -> None:
        """That every file is as it was written; process 0 looks, and tells the others."""
        found = damage(self.folder / str(step), items) if hosts.is_first() else ""
        if problem := hosts.told_by_any(found):
            raise DamagedError(self._about(step, problem))

    def _add_checksums(self) -> None:
        if hosts.is_first():
            (folder,) = self.folder.glob(f"{self.saving}.orbax-checkpoint-tmp*")
            write_checksums(folder)
            self.took = time.monotonic() - self._began

    def _check(self, step: int, wanted: dict[str, Any]) -> None:
        """Check that the checkpoint is of such a model, by names and shapes, without its arrays."""
        for item, tree in wanted.items():
            try:
                saved = dict(self._manager.item_metadata(step)[item].tree)
            except Exception as error:
                raise DamagedError(self._about(step, str(error) or repr(error))) from error
            shapes = {name: tuple(leaf.shape) for name, leaf in tree.items()}
            there = {name: tuple(leaf.shape) for name, leaf in saved.items()}
            if shapes == there:
                continue
            differing = [n for n in {**shapes, **there} if shapes.get(n) != there.get(n)]
            first = differing[0]
            raise UserError(
                f"{self.folder / str(step)} is a checkpoint of another model: {first} is "
                f"{there.get(first, 'absent')} there and {shapes.get(first, 'absent')} in this "
                f"run's configuration ({len(differing)} of {len(shapes)} arrays differ)"
            )

    def _about(self, step: int | str, problem: str) -> str:
        first = problem.strip().splitlines()[0]
        return f"the checkpoint {self.folder / str(step)} is damaged: {first[:200]}"

    def _no_room(self) -> str:
        """What the disk refuses before anything is begun: hosts can still agree not to begin."""
        try:
            with tempfile.TemporaryFile(dir=self.folder) as probe:
                probe.write(bytes(_ROOM))
                probe.flush()
        except OSError as error:
            return _refusal(error)
        return ""

    def _given_up(self, step: int, why: str) -> SaveError:
        """The error, after which nothing half-written is left, and saving can be tried again."""
        with contextlib.suppress(Exception):
            self._manager.close()
        if hosts.is_first():
            for part in self.folder.glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(part, ignore_errors=True)
        self.saving, self._manager = 0, self._open()
        return self._save_error(step, why)

    def _save_error(self, step: int, why: str) -> SaveError:
        return SaveError(
            f"step {step} could not be saved in {self.folder}: {why}. The checkpoints before "
            "it are complete; make room and run the same command again to continue from them"
        )


def id_of(folder: Path) -> str:
    """The id of the run in a folder; "" if it was begun before runs had ids."""
    try:
        return str(atomic.read_object(folder / ID)["id"])
    except FileNotFoundError:
        return ""
    except (ValueError, KeyError) as error:
        raise UserError(f"{folder / ID} is damaged: {error}") from None


def _problem(folder: Path) -> str:
    """What keeps a folder from being the checkpoint of the step that it is named after, or ""."""
    if not folder.is_dir():
        return "it is no folder"
    if problem := damage(folder, ["metrics", "note"]):
        return problem
    try:
        step = _note(folder).get("step", folder.name)
    except (OSError, ValueError) as error:
        return f"its note cannot be read: {error}"
    return "" if str(step) == folder.name else f"it is the checkpoint of step {step}"


def _note(folder: Path) -> dict[str, Any]:
    """The note of a checkpoint."""
    return atomic.read_object(folder / "note" / "metadata")


def _refusal(error: Exception | None) -> str:
    """What the disk has refused, in words; "" for an error of another kind."""
    text = str(error)
    if not isinstance(error, OSError) and not any(word in text for word in (*_FULL, *_DISK)):
        return ""
    full = any(word in text for word in _FULL)
    return "the disk is full" if full else text.strip().splitlines()[0][:200]


def _loss(metrics: dict[str, float]) -> float:
    """By which checkpoints are compared; one whose loss is not a number is the worst."""
    nll = float(metrics["nll"])
    return nll if math.isfinite(nll) else math.inf


class DamagedError(UserError):
    """A checkpoint that cannot be read."""


class SaveError(UserError):
    """A checkpoint that could not be written; those before it are complete."""

    at_once = True  # Orbax's threads may still write, and would end in a traceback with Python
