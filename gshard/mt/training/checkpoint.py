"""Checkpoints by Orbax: asynchronous, each host writing its own shards, whole or absent.

Weights and optimizer state are saved under their logical names and shapes, whatever devices held
them, so that they can be restored on another number of devices and under other annotations. Every
file has a checksum; a checkpoint with a file that differs is named and passed over.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

import gshard
from gshard.mt import hosts
from gshard.mt.errors import UserError, nearest
from gshard.mt.run import Run
from gshard.mt.training import checksums
from gshard.mt.training.weights import WEIGHTS, read_weights
from gshard.nn.config import TransformerConfig
from gshard.nn.strategy import ONE_DEVICE, Strategy
from gshard.nn.transformer import Transformer
from gshard.uneven import UnevenArray

FOLDER = "checkpoints"
_ITEMS = ("model", "optimizer", "note")
_FULL = ("No space left", "ENOSPC", "Disk quota", "RESOURCE_EXHAUSTED")
_DISK = (*_FULL, "Read-only file system", "Permission denied", "Input/output error")

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
                async_options=ocp.AsyncOptions(post_finalization_callback=self._add_checksums),
            )
            return ocp.CheckpointManager(
                self.folder, item_names=_ITEMS, item_handlers=handlers, options=options
            )

        self.damaged = self._set_aside(read_only)  # a line about each
        self._open = manager
        self._manager = manager()
        self._saving = 0  # the step that is being written

    @property
    def steps(self) -> list[int]:
        """The steps that were saved whole, in order."""
        return sorted(self._manager.all_steps())

    def best(self) -> int:
        """The step with the lowest loss on dev text."""
        return int(self._manager.best_step() or self.steps[-1])

    def save(
        self, step: int, model: Any, optimizer: Any, note: dict[str, Any], dev_nll: float
    ) -> None:
        """Begin to save; the arrays may be donated as soon as this returns.

        A `SaveError`, here or from `wait`, leaves the checkpoints before as they are; saving can
        be tried again.
        """
        self.wait()
        self._saving = step
        with self._explained(step):
            if step in self.steps:  # a damaged one, which training has passed over
                self._manager.delete(step)
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    model=ocp.args.StandardSave(named(model)),
                    optimizer=ocp.args.StandardSave(named(optimizer)),
                    note=ocp.args.JsonSave(note),
                ),
                metrics={"nll": dev_nll},
                force=True,
            )

    def wait(self) -> None:
        """Until everything is on disk; what went wrong in the background is raised here."""
        with self._explained(self._saving):
            self._manager.wait_until_finished()
        self._saving = 0

    def check(self) -> None:
        """Raise what went wrong in the background, if that is known already.

        Several hosts have to wait at the same step, which is when the next save begins.
        """
        if self._saving and jax.process_count() == 1 and not self._manager.is_saving_in_progress():
            self.wait()

    def forget_after(self, step: int) -> None:
        """Remove all checkpoints of later steps."""
        for later in [s for s in self.steps if s > step]:
            self._manager.delete(later)

    def close(self) -> None:
        """Finish writing and let go."""
        with contextlib.suppress(SaveError):  # has been told by `wait`, or does not matter any more
            self.wait()
        self._manager.close()

    def restore_newest(
        self, model: Any, optimizer: Any
    ) -> tuple[Any, Any, dict[str, Any], list[str]] | None:
        """The newest checkpoint that is whole, as trees like those given (shapes with shardings).

        Returns the trees, the note, and a line about each newer checkpoint that is damaged.
        """
        damaged = list(self.damaged)
        for step in reversed(self.steps):
            try:
                return (*self.restore(step, model, optimizer), damaged)
            except DamagedError as error:
                damaged.append(str(error))
        if damaged:
            raise UserError("\n".join([*damaged, "no whole checkpoint is left"]))
        return None

    def newest_note(self) -> dict[str, Any] | None:
        """The note of the newest checkpoint that has one."""
        for step in reversed(self.steps):
            try:
                return dict(self._restored(step, {})["note"])
            except DamagedError:
                continue
        return None

    def restore(self, step: int, model: Any, optimizer: Any) -> tuple[Any, Any, dict[str, Any]]:
        """The checkpoint of one step."""
        found = self._restored(step, {"model": model, "optimizer": optimizer})
        return found["model"], found["optimizer"], found["note"]

    def restore_model(self, step: int, model: Any) -> Any:
        """The weights of one step, without the optimizer's state."""
        return self._restored(step, {"model": model})["model"]

    def _restored(self, step: int, trees: dict[str, Any]) -> dict[str, Any]:
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
        """Move checkpoints away whose figures are damaged: Orbax cannot even list those."""
        lines = []
        for folder in sorted(self.folder.glob("[0-9]*")) if hosts.is_first() else ():
            if not folder.name.isdigit() or not (folder / checksums.FILE).exists():
                continue
            if not (problem := checksums.problem(folder, ["metrics"])):
                continue
            about = self._about(int(folder.name), problem)
            if read_only:
                raise DamagedError(f"{about}; `gshard train {self.folder.parent}` sets it aside")
            place = self.folder.parent / "damaged" / f"{folder.name}-{time.time_ns()}"
            place.parent.mkdir(exist_ok=True)
            folder.rename(place)
            lines.append(f"{about} (it is in {place} now)")
        hosts.wait_for_all("damaged checkpoints")
        return lines

    def _verify(self, step: int, items: Sequence[str]) -> None:
        """That every file is as it was written; process 0 looks, and tells the others."""
        first = hosts.is_first()
        problem = checksums.problem(self.folder / str(step), items) if first else "see process 0"
        if hosts.told_by_first(bool(problem)):
            raise DamagedError(self._about(step, problem))

    def _add_checksums(self) -> None:
        if hosts.is_first():
            (folder,) = self.folder.glob(f"{self._saving}.orbax-checkpoint-tmp*")
            checksums.write(folder)

    def _check(self, step: int, wanted: dict[str, Any]) -> None:
        """That the checkpoint is of such a model: names and shapes are told without its arrays."""
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

    def _about(self, step: int, problem: str) -> str:
        first = problem.strip().splitlines()[0]
        return f"the checkpoint {self.folder / str(step)} is damaged: {first[:200]}"

    @contextlib.contextmanager
    def _explained(self, step: int) -> Iterator[None]:
        """What the disk refuses becomes a `SaveError`, and leaves nothing half-written."""
        try:
            yield
        except Exception as error:
            text = str(error)
            if not isinstance(error, OSError) and not any(word in text for word in _DISK):
                raise
            with contextlib.suppress(Exception):
                self._manager.close()
            if hosts.is_first():
                for part in self.folder.glob("*.orbax-checkpoint-tmp*"):
                    shutil.rmtree(part, ignore_errors=True)
            self._saving, self._manager = 0, self._open()
            full = any(word in text for word in _FULL)
            why = "the disk is full" if full else text.strip().splitlines()[0][:200]
            raise SaveError(
                f"step {step} could not be saved in {self.folder}: {why}. The checkpoints before "
                "it are whole; make room and run the same command again to continue from them"
            ) from error


def _loss(metrics: dict[str, float]) -> float:
    """By which checkpoints are compared; one whose loss is not a number is the worst."""
    nll = float(metrics["nll"])
    return nll if math.isfinite(nll) else math.inf


class DamagedError(UserError):
    """A checkpoint that cannot be read."""


class SaveError(UserError):
    """A checkpoint that could not be written; those before it are whole."""


def load_model(run: Run, which: str = "best", like: Any = None) -> tuple[Transformer, int]:
    """The weights of a run and their step: "best", "last", a step, or "untrained" for fresh ones.

    `like` is the model as shapes with shardings (`model_like`); each host then reads only what
    its devices hold. Without it the weights come whole to this process.
    """
    if which == "untrained":
        return _fresh(run, like), 0
    if (run.folder / WEIGHTS).is_file():
        return _released(run, which, like)
    checkpoints = Checkpoints(run.folder, read_only=True)
    step = _chosen(checkpoints, which, run.folder)
    if like is None:
        like = model_like(run.model_config)
    return checkpoints.restore_model(step, like), step


def model_like(config: TransformerConfig, strategy: Strategy = ONE_DEVICE) -> Transformer:
    """A model as shapes with shardings, as a strategy spreads it: experts split, the rest whole."""
    shapes = eqx.filter_eval_shape(Transformer, config, jax.random.key(0))
    if strategy.devices > 1:
        spread = gshard.jit(
            functools.partial(strategy.weights, stacked=1),
            devices=jax.devices()[: strategy.devices],
        )
        (shapes,) = spread.lower(shapes).in_info
        return shapes
    whole = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), shapes
    )


def _fresh(run: Run, like: Any) -> Transformer:
    """The weights before training, made where they belong."""

    def fresh() -> Transformer:
        return Transformer(run.model_config, jax.random.key(run.config.train.seed))

    if like is None:
        return fresh()
    return jax.jit(fresh, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, like))()


def _released(run: Run, which: str, like: Any) -> tuple[Transformer, int]:
    """The weights of a release, which has those of one step, in the model's dtypes."""
    path = run.folder / WEIGHTS
    arrays, note = read_weights(path)
    like = like or model_like(run.model_config)
    wanted = named(like)
    if {n: a.shape for n, a in arrays.items()} != {n: leaf.shape for n, leaf in wanted.items()}:
        raise UserError(f"{path} holds the weights of another model than {run.folder} describes")
    step = int(note.get("step", 0))
    if which not in ("best", "last", str(step)):
        raise UserError(
            f"no checkpoint {which!r} in {run.folder}: it is the release of step {step}"
        )

    def part(name: str, where: Any) -> np.ndarray:
        return arrays[name][where].astype(wanted[name].dtype)

    placed = {
        name: jax.make_array_from_callback(
            leaf.shape, leaf.sharding, functools.partial(part, name), dtype=leaf.dtype
        )
        for name, leaf in wanted.items()
    }
    return unnamed(placed, like), step


def _chosen(checkpoints: Checkpoints, which: str, folder: Path) -> int:
    steps = checkpoints.steps
    if not steps:
        raise UserError(f"{folder} has no whole checkpoint yet; `gshard train {folder}` makes some")
    if which == "best":
        return checkpoints.best()
    if which == "last":
        return steps[-1]
    if which.isdigit() and int(which) in steps:
        return int(which)
    known = ("best", "last", "untrained", *map(str, steps))
    raise UserError(
        f"no checkpoint {which!r} in {folder}; there are {', '.join(known)}{nearest(which, known)}"
    )


def named(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths, as `encoder.dense.self_norm.scale`.

    An array that does not divide over its devices is saved by its logical value.
    """
    leaves = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda leaf: isinstance(leaf, UnevenArray)
    )
    return {
        _name(path): leaf.logical() if isinstance(leaf, UnevenArray) else leaf
        for path, leaf in leaves
    }


def unnamed(leaves: dict[str, Any], like: Any) -> Any:
    """The tree `like`, with the leaves that `named` gave."""
    return jax.tree_util.tree_map_with_path(lambda path, _: leaves[_name(path)], like)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".") or "value"
