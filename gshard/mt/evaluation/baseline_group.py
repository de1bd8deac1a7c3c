"""Many small models trained at once, each on its own text: one program, mapped over the models.

A bilingual model is too small to fill a device by itself. Here the weights, the optimizer's state
and the batches of N equal models are stacked, and the training step of one is mapped over dim 0.
Split over devices along that dim, it needs no communication. Every few steps each model's loss on
dev text is measured; its best weights are kept, and it stops when they have stayed the best.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import gshard
from gshard.mt.batching.batches import Batches
from gshard.mt.batching.packing import Arrays
from gshard.mt.launch.status import belong_to_parent
from gshard.nn.config import Batch, TransformerConfig
from gshard.nn.step import TrainState, eval_step, init_state, train_step
from gshard.nn.transformer import Transformer

_AHEAD = 16  # batches read ahead


@dataclass(frozen=True)
class BaselineTraining:
    """How every model of a group is trained."""

    learning_rate: float = 1e-3  # Adam's, at its highest
    warmup: int = 400  # steps; after them it falls with the square root of the step
    fall: float = 0.0  # the share of a model's steps, at their end, over which it falls to 0
    label_smoothing: float = 0.1
    dev_every: int = 100  # steps between two measurements of the loss on dev text
    patience: int = 8  # measurements without a new best before a model stops

    def optimizer(self, steps: Array | int) -> optax.GradientTransformation:
        """Adam, with the schedule of "Attention is all you need" for so many steps, and its end."""

        def rate(count: Any) -> Array:
            t = jnp.asarray(count, jnp.float32) + 1.0
            usual = jnp.minimum(t / self.warmup, jnp.sqrt(self.warmup / t))
            left = (steps + 1 - t) / jnp.maximum(self.fall * steps, 1.0)
            return self.learning_rate * usual * jnp.clip(left, 0.0, 1.0)

        return optax.adam(rate, b1=0.9, b2=0.98, eps=1e-9)


class GroupState(NamedTuple):
    """N models in training; every array has the models in dim 0."""

    train: TrainState
    best: Transformer  # the weights with the lowest loss on dev text
    best_nll: Array
    best_step: Array
    waited: Array  # measurements since then
    running: Array  # whether it may still become better


class BaselineGroup:
    """The programs of N models of one shape."""

    def __init__(
        self,
        config: TransformerConfig,
        training: BaselineTraining,
        count: int,
        devices: Sequence[jax.Device] | None = None,
    ):
        self.count, self.training = count, training
        chosen = list(jax.devices()[:1] if devices is None else devices)[:count]
        parts = len(chosen)
        optimizer = training.optimizer(1)  # its state is the same for any number of steps

        def spread(tree: Any) -> Any:
            return jax.tree.map(lambda x: gshard.split(x, 0, parts), tree)

        def first(keys_N: Array) -> GroupState:
            train = jax.vmap(lambda key: init_state(config, optimizer, key))(keys_N)
            zeros_N = jnp.zeros((count,), jnp.int32)
            nll_N = jnp.full((count,), jnp.inf, jnp.float32)
            # Not the same arrays twice: a step gives back the memory of those it has used.
            best = jax.tree.map(jnp.copy, train.model)
            running_N = jnp.ones((count,), bool)
            return GroupState(train, best, nll_N, zeros_N, jnp.copy(zeros_N), running_N)

        def step(
            state: GroupState, batch: Batch, keys_N: Array, limits_N: Array
        ) -> tuple[GroupState, Array]:
            def one(
                state: TrainState, batch: Batch, key: Array, limit: Array
            ) -> tuple[TrainState, Array]:
                optimizer, smoothing = training.optimizer(limit), training.label_smoothing
                state, metrics = train_step(
                    state, batch, key, optimizer=optimizer, label_smoothing=smoothing
                )
                return state, metrics.nll

            train, nll_N = jax.vmap(one)(state.train, batch, keys_N, limits_N)
            return state._replace(train=train), nll_N

        def dev(models: Transformer, batch: Batch) -> tuple[Array, Array]:
            metrics = jax.vmap(eval_step)(models, batch)
            return metrics.nll * metrics.tokens, metrics.tokens

        def keep_best(state: GroupState, nll_N: Array, limits_N: Array) -> GroupState:
            return judge(state, nll_N, limits_N, training.patience)

        def program(fn: Callable[..., Any], *donated: int) -> Any:
            if parts == 1:
                return jax.jit(fn, donate_argnums=donated)

            @functools.wraps(fn)
            def split(*args: Any) -> Any:
                return spread(fn(*spread(args)))

            return gshard.jit(split, devices=chosen, donate_argnums=donated)

        self._plain_first = first
        self.first, self.step = program(first), program(step, 0)
        self.dev, self.keep_best = program(dev), program(keep_best, 0)

    def state_like(self) -> GroupState:
        """The shapes of the state."""
        return jax.eval_shape(self._plain_first, stacked_keys(range(self.count)))

    def train(
        self,
        batches: Sequence[Batches],
        dev: Sequence[Sequence[Arrays]],
        seeds: Sequence[int],
        limits: Sequence[int],
        state: GroupState | None = None,
        on_dev: Callable[[int, GroupState], None] | None = None,
        workers: int = 0,
    ) -> GroupState:
        """Train every model on its own `batches` until it stops getting better, or its limit.

        `dev` has batches of each model's dev text. `on_dev` is called with the step and the state
        after every measurement; a training that is given such a `state` resumes from it.
        """
        keys_N = stacked_keys(seeds)
        if state is None:
            state = self.first(keys_N)
        every = self.training.dev_every
        limits_N = np.array([-(-limit // every) * every for limit in limits], np.int32)
        dev_batches = stacked_dev(dev)
        step = int(np.max(np.asarray(state.train.step)))
        with contextlib.closing(read_ahead(batches, step, workers)) as ahead:
            while np.asarray(state.running).any():
                for _ in range(every):
                    state, _ = self.step(state, next(ahead), keys_N, limits_N)
                    step += 1
                sums = [self.dev(state.train.model, batch) for batch in dev_batches]
                nll_N = sum(np.asarray(nll) for nll, _ in sums)
                tokens_N = sum(np.asarray(tokens) for _, tokens in sums)
                mean_N = np.asarray(nll_N / np.maximum(tokens_N, 1), np.float32)
                state = self.keep_best(state, mean_N, limits_N)
                if on_dev:
                    on_dev(step, state)
        return state


# The programs for a group, compiled once for all groups of one shape.
compiled_group = functools.lru_cache(maxsize=8)(BaselineGroup)


def judge(state: GroupState, nll_N: Array, limits_N: Array, patience: int) -> GroupState:
    """Keep each model's weights if they are its best; stop it when out of patience or steps."""
    better_N = state.running & (nll_N < state.best_nll)

    def chosen(new: Array, old: Array) -> Array:
        return jnp.where(better_N.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    waited_N = jnp.where(better_N, 0, state.waited + 1)
    return GroupState(
        state.train,
        jax.tree.map(chosen, state.train.model, state.best),
        chosen(nll_N, state.best_nll),
        chosen(state.train.step, state.best_step),
        waited_N,
        state.running & (waited_N < patience) & (state.train.step < limits_N),
    )


def stacked_keys(seeds: Sequence[int]) -> Array:
    """A random key for each model, of the kind that draws the same numbers mapped and alone."""
    keys = [jax.random.key_data(jax.random.key(seed, impl="threefry2x32")) for seed in seeds]
    return jax.random.wrap_key_data(jnp.stack(keys), impl="threefry2x32")


def stacked(arrays: Sequence[Arrays]) -> Batch:
    """The batches of all models as one, with the models in dim 0."""
    return Batch(*(np.stack([a[name] for a in arrays]) for name in Batch._fields))  # type: ignore[arg-type]


def stacked_dev(dev: Sequence[Sequence[Arrays]]) -> list[Batch]:
    """Dev batches of all models; models with fewer get empty ones, which count nothing."""
    longest = max(len(batches) for batches in dev)
    empty = {name: np.zeros_like(array) for name, array in dev[0][0].items()}
    filled = [[*batches, *[empty] * (longest - len(batches))] for batches in dev]
    return [stacked(batches) for batches in zip(*filled, strict=True)]


_mine: list[Batches] = []  # of a worker process


def _adopt(batches: list[Batches]) -> None:
    belong_to_parent()
    _mine[:] = batches


def _make(step: int, batches: Sequence[Batches] = _mine) -> Batch:
    return stacked([each[step] for each in batches])


def _joined(parts: Sequence[Batch]) -> Batch:
    """The parts that processes made, one after the other."""
    if len(parts) == 1:
        return parts[0]
    # NumPy's, which programs take.
    joined: Any = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return Batch(*joined)


def read_ahead(
    batches: Sequence[Batches], step: int, workers: int = 0
) -> Generator[Batch, None, None]:
    """The stacked batches from `step` on, made while the devices compute.

    One thread makes them, or so many processes, each those of its own models at every step: steps
    that follow each other are packed together, and two processes would both pack them.
    """
    pools: list[Executor] = [ThreadPoolExecutor(1)]
    make: Callable[[int], Batch] = functools.partial(_make, batches=batches)
    if workers:
        spawn = multiprocessing.get_context("spawn")  # a fork of JAX's threads could hang
        size, make = -(-len(batches) // workers), _make
        parts = [list(batches[i : i + size]) for i in range(0, len(batches), size)]
        pools = [ProcessPoolExecutor(1, spawn, _adopt, (part,)) for part in parts]

    def submitted(step: int) -> list[Future[Batch]]:
        return [pool.submit(make, step) for pool in pools]

    try:
        waiting = deque(submitted(step + i) for i in range(_AHEAD))
        for later in itertools.count(step + _AHEAD):
            batch = _joined([part.result() for part in waiting.popleft()])
            waiting.append(submitted(later))
            yield batch
    finally:
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)


def model_of(models: Transformer, i: int) -> Transformer:
    """One of the stacked models, on the host."""
    return jax.tree.map(lambda leaf: np.asarray(leaf[i]), models)
