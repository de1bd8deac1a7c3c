"""The compiled programs of a run: its first weights, a training step, a loss on dev text.

Each is written as for one device, and partitioned by `gshard.jit` under the run's strategy. The
loss guard is part of a step: an update that would do harm is left out, and counted. It decides on
the device, from numbers that are checkpointed with the weights: a run that is resumed decides the
same, and no step waits for the host.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import Array

import gshard
from gshard.errors import UserError
from gshard.mt.batching.batches import Host
from gshard.mt.batching.packing import Arrays
from gshard.mt.config import OptimizerConfig, RunConfig, settings
from gshard.mt.training import kept
from gshard.mt.training.kept import for_shapes, layout_of_run
from gshard.nn.config import Batch, Remat, TransformerConfig, choose_remat
from gshard.nn.optimizer import adafactor, adam, inverse_sqrt
from gshard.nn.step import Optimizer, StepMetrics, TrainState, eval_step, init_state, train_step
from gshard.nn.strategy import ONE_DEVICE, Strategy
from gshard.nn.transformer import Transformer

_MEMORY = 0.98  # of the running mean: about the last 50 losses
_SETTLED = 50  # losses before anything finite can be called a spike
_LEAST = 0.02  # of the mean: a deviation never counts as less, however smooth the curve


class Guard(NamedTuple):
    """What is remembered of the losses so far."""

    mean: Array
    deviation: Array
    seen: Array
    skipped: Array  # updates left out, in all
    in_a_row: Array

    @staticmethod
    def new() -> Guard:
        """Nothing seen yet."""
        zero, none = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
        return Guard(zero, zero, none, none, none)

    def judge(self, loss: Array, grad_norm: Array, spike: float) -> tuple[Guard, Array]:
        """Whether to learn from a step with this loss and gradient, and what to remember."""
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        width = jnp.maximum(self.deviation, _LEAST * jnp.abs(self.mean))
        usual = (self.seen < _SETTLED) | (loss <= self.mean + spike * width)
        good = finite & usual
        # Early on the mean is over what was seen, later it forgets.
        memory = jnp.minimum(_MEMORY, self.seen / (self.seen + 1.0))
        loss = jnp.where(good, loss, self.mean)
        mean = memory * self.mean + (1 - memory) * loss
        deviation = memory * self.deviation + (1 - memory) * jnp.abs(loss - mean)
        bad = (~good).astype(jnp.int32)
        judged = Guard(
            jnp.where(good, mean, self.mean),
            jnp.where(good, deviation, self.deviation),
            self.seen + 1 - bad,
            self.skipped + bad,
            (self.in_a_row + 1) * bad,
        )
        return judged, good


def choose(good: Array, new: Any, old: Any) -> Any:
    """The tree `new` if the step was good, else `old`."""
    return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)


def advice(in_a_row: int, loss: float, learning_rate: float) -> str:
    """What to say when training gives up."""
    return (
        f"the last {in_a_row} updates were left out, for losses that were not finite or far above "
        f"the mean (now {loss:.3g}). The checkpoint before them is good. What helps most often: a "
        f"lower optimizer.learning_rate (it is {learning_rate:g}) or a longer optimizer.rise; "
        "float32 instead of bfloat16 (model.dtype); or looking at the data of these steps. "
        "If the higher loss is intended, raise train.spike"
    )


T = TypeVar("T")

_OTHERS = ("name", "data")  # settings that no program depends on


class RunState(NamedTuple):
    """All that a step changes, and all that a checkpoint has to hold."""

    train: TrainState
    guard: Guard


class StepFigures(NamedTuple):
    """What a step tells: its losses, and the updates left out so far and lately."""

    metrics: StepMetrics
    skipped: Array
    in_a_row: Array


def schedule(config: OptimizerConfig) -> optax.Schedule:
    """The learning rate by step."""
    if not 0 <= config.fall <= config.end:
        raise UserError(
            f"optimizer.fall is {config.fall} and optimizer.end {config.end}: the learning rate "
            "falls over that many steps before the step `end`"
        )
    falling = inverse_sqrt(config.learning_rate, config.warmup)

    def rate(count: Any) -> Array:
        t = jnp.asarray(count, jnp.float32)
        risen = jnp.minimum((t + 1.0) / max(config.rise, 1), 1.0)
        if not config.fall:
            return falling(count) * risen
        return falling(count) * risen * jnp.clip((config.end - t) / config.fall, 0.0, 1.0)

    return rate


def make_optimizer(config: OptimizerConfig) -> Optimizer:
    """The optimizer that the configuration names."""
    rate = schedule(config)
    return adafactor(rate, fused=config.fused) if config.name == "adafactor" else adam(rate)


@dataclass(frozen=True)
class Setup:
    """What programs are made from.

    `folder` is the run's, where a layout that gshard chose is kept. `teacher` is the model to learn
    from, or its shapes where nothing but compiling is done. With `keeps_step` a compiled step is
    found by its settings (`gshard.mt.training.kept`).
    """

    config: RunConfig
    model: TransformerConfig
    devices: Sequence[jax.Device]
    strategy: Strategy
    folder: Path | None = None
    teacher: Transformer | None = None
    keeps_step: bool = False

    @property
    def layout_folder(self) -> Path | None:
        """Where the layout is that gshard chooses, if it does."""
        return self.folder if self.config.devices.layout == "auto" else None

    def settings(self) -> dict[str, object] | None:
        """The settings that programs follow from; None where a step is not kept under them."""
        if not self.keeps_step or self.layout_folder:  # a layout is not among them
            return None
        used = {n: x for n, x, _ in settings(self.config) if n.partition(".")[0] not in _OTHERS}
        return {**used, "model": self.model, "strategy": self.strategy}


class Programs:
    """What a run computes, on the devices it has."""

    def __init__(self, setup: Setup):
        config, strategy = setup.config, setup.strategy
        self.devices = list(setup.devices)
        self._folder, self._settings = setup.layout_folder, setup.settings()
        # With several hosts each brings its own rows, or all of them where they do not divide.
        split = config.batch.rows % len(self.devices) == 0
        self.host = Host(jax.process_index(), jax.process_count()) if split else Host()
        optimizer = make_optimizer(config.optimizer)
        # One key serves the whole run: steps and layers fold their numbers into it.
        self._key = jax.random.key(config.train.seed)

        def first(key: Array, strategy: Strategy = strategy) -> RunState:
            fresh = init_state(setup.model, optimizer, jax.random.fold_in(key, 0), strategy)
            return RunState(fresh, Guard.new())

        def dev(model: Transformer, batch: Batch) -> StepMetrics:
            return readable(eval_step(model, batch, strategy=strategy))

        def step(
            state: RunState, batch: Batch, key: Array, teacher: Transformer | None, **how: Any
        ) -> tuple[RunState, StepFigures]:
            learned, metrics = train_step(
                state.train,
                batch,
                jax.random.fold_in(key, 1),
                optimizer=optimizer,
                strategy=strategy,
                label_smoothing=config.train.label_smoothing,
                teacher=teacher,
                teacher_share=config.distill.share,
                **how,
            )
            judged, good = state.guard.judge(metrics.loss, metrics.grad_norm, config.train.spike)
            after = choose(good, learned, state.train)._replace(step=learned.step)
            figures = StepFigures(metrics, judged.skipped, judged.in_a_row)
            return RunState(after, judged), readable(figures)

        jit = functools.partial(gshard.jit, devices=self.devices, reproducible=config.reproducible)
        self._jit, self._plain_first, self._plain_step = jit, first, step
        self._first, self._dev, self._step = (jit(first), jit(dev), jit(step, donate_argnums=0))
        self._compiled: dict[Any, Any] = {}  # steps, by the shapes of a batch
        self.teacher, self._placed_key = setup.teacher, None
        self._finite = gshard.jit(all_finite, devices=self.devices)
        self._shapes = jax.eval_shape(functools.partial(first, strategy=ONE_DEVICE), self._key)

    def first_state(self) -> RunState:
        """Fresh weights, made where they belong."""
        return self._first(self._key)

    def compile(self, arrays: Arrays) -> RunState:
        """Make the step ready; returns the state as shapes with the shardings that it wants."""
        arguments = self._shapes, self._global(_local(arrays)), self._key, self.teacher
        step: Any = None
        if self._settings is not None:
            key = kept.key_of(self._settings, arguments, self.devices)
            step = kept.find(key, arguments, self.devices)
        if step is not None:
            state, *_ = step.in_info
        else:
            lowered = self._partitioned(arguments).lower(*arguments)
            step, (state, *_) = lowered.compile(), lowered.in_info
            if self._settings is not None:
                kept.keep(key, step, self.devices)
        self._compiled[_shapes_of(arrays)] = step
        return state

    def _partitioned(self, arguments: tuple[Any, ...]) -> Any:
        """The step under the run's strategy, or under the layout in the run's folder."""
        plain = self._fitting(arguments)
        if self._folder is None or len(self.devices) == 1:
            return self._step if plain is self._plain_step else self._jit(plain, donate_argnums=0)
        count = len(self.devices)
        layout = layout_of_run(self._folder, plain, arguments, count)
        layout = for_shapes(layout, arguments)
        step = self._jit(plain, donate_argnums=0, annotations=layout)
        # The first weights are made where the step wants them.
        state, *_ = step.lower(*arguments).in_shardings
        self._first = self._jit(self._plain_first, out_shardings=state)
        return step

    def _fitting(self, arguments: tuple[Any, ...]) -> Any:
        """The step, with rematerialization if it does not fit into a budget without."""
        remat = self._shapes.train.model.config.remat
        if not isinstance(remat, int):
            return self._plain_step

        def memory(setting: Remat) -> int:
            step = functools.partial(self._plain_step, remat=setting)
            lowered = self._jit(step, donate_argnums=0).lower(*arguments)
            return int(lowered.forecast().memory_bytes)

        chosen = choose_remat(remat, memory)
        return functools.partial(self._plain_step, remat=chosen)

    def compile_all(self, arrays: Arrays) -> int:
        """Compile everything for JAX's cache, and hold no array; how many programs there are."""
        shapes = self.compile(arrays)
        batch = self._global(_local(arrays))
        for lowered in (
            self._first.lower(self._key),
            self._dev.lower(shapes.train.model, batch),
            self._finite.lower(shapes.train),
        ):
            lowered.compile()
        return 4

    def step(self, state: RunState, arrays: Arrays) -> tuple[RunState, StepFigures]:
        """One update from this host's part of a batch; `state` is used up."""
        shapes, batch = _shapes_of(arrays), self.batch(arrays)
        if shapes not in self._compiled:  # of another bucket
            self.compile(arrays)
        if self._placed_key is None:  # hosts exchange the sharding of a key: once is enough
            placed = self._compiled[shapes].place(state, batch, self._key, self.teacher)
            state, batch, self._placed_key, self.teacher = placed
        return self._compiled[shapes](state, batch, self._placed_key, self.teacher)

    def check(self, state: RunState, arrays: Arrays) -> gshard.Report:
        """One update, value by value, beside the unpartitioned program; `state` stays as it is."""
        arguments = state, self.batch(arrays), self._key, self.teacher
        return gshard.check(self._partitioned(arguments), *arguments)

    def prove(self, state: RunState, arrays: Arrays) -> gshard.Report:
        """Whether an update is that of the unpartitioned program, from shapes alone."""
        arguments = state, self.batch(arrays), self._key, self.teacher
        return gshard.prove(self._partitioned(arguments), *arguments)

    def dev(self, model: Transformer, arrays: Arrays) -> StepMetrics:
        """The losses on a batch."""
        return self._dev(model, self.batch(arrays))

    def finite(self, state: RunState) -> bool:
        """Whether every number of the state is one."""
        return bool(self._finite(state.train))

    def batch(self, arrays: Arrays) -> Batch:
        """This host's rows (`host`) as their part of the batch of all hosts."""
        local = _local(arrays)
        if jax.process_count() == 1:
            return local
        mesh = jax.sharding.Mesh(self.devices, ("devices",))
        split = jax.sharding.PartitionSpec("devices" if self.host.count > 1 else None)
        place = jax.sharding.NamedSharding(mesh, split)
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(place, x), local)

    def _global(self, batch: Batch) -> Batch:
        count = self.host.count
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((len(x) * count, *x.shape[1:]), x.dtype), batch
        )


def readable(figures: T) -> T:
    """Figures that every host can read: whatever the layout, each has all of them."""
    replicated: T = jax.tree.map(gshard.replicate, figures)
    return replicated


def parts(state: RunState) -> tuple[Any, Any]:
    """The weights, and everything else that a checkpoint holds."""
    rest = {"opt_state": state.train.opt_state, "step": state.train.step, "guard": state.guard}
    return state.train.model, rest


def joined(model: Any, rest: dict[str, Any]) -> RunState:
    """The state of a checkpoint."""
    return RunState(TrainState(model, rest["opt_state"], rest["step"]), rest["guard"])


def all_finite(tree: Any) -> Array:
    """Whether no leaf of a tree holds NaN or infinity."""
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in floats]).all()


def _shapes_of(arrays: Arrays) -> tuple[tuple[int, ...], ...]:
    return tuple(arrays[name].shape for name in Batch._fields)


def _local(arrays: Arrays) -> Batch:
    return Batch(*(arrays[name] for name in Batch._fields))  # type: ignore[arg-type]
