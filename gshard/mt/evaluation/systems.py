"""The checkpoints of a run as systems, on the devices of one process or of several.

The first process measures (`evaluate`); the others hold their part of the weights and run what it
runs (`Systems.follow`).

Which experts each language uses is counted layer by layer: the model reads the references (teacher
forcing), one language at a time, with room for every token at every expert. With the capacity of
training, a batch of one language would fill its favourite experts and spill over to the rest, and
every language would look alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import numpy as np

import gshard
from gshard.errors import UserError
from gshard.mt import hosts
from gshard.mt.batching.packing import Arrays, fill, pack
from gshard.mt.batching.tokenizer import Tokenizer
from gshard.mt.batching.tokens import TaskTokens, in_memory
from gshard.mt.broadcast import Broadcast
from gshard.mt.config import DeviceConfig
from gshard.mt.decoding.engines import EngineConfig, on_host, open_translator
from gshard.mt.decoding.translator import Translator
from gshard.mt.evaluation.evaluate import EvaluateConfig, System, digest_of, search_of
from gshard.mt.evaluation.store import AnyTranslator, HeldOut
from gshard.mt.launch.environment import Hosts
from gshard.mt.progress import SILENT, Progress
from gshard.mt.run import Run
from gshard.mt.training.loading import load_model, model_like
from gshard.mt.training.weights import count_of
from gshard.nn.config import Batch
from gshard.nn.strategy import ONE_DEVICE, Strategy
from gshard.nn.transformer import Transformer

Loads = dict[str, list[list[float]]]  # by task: the share of each expert, for each MoE layer
Routed = Callable[[Batch], Mapping[str, Any]]
_ROWS = 16  # of a batch, or as many as there are devices
_BATCHES = 8  # of each language, at most


def expert_loads(
    model: Transformer,
    tokenizer: Tokenizer,
    sets: Sequence[HeldOut],
    lengths: tuple[int, int],
    strategy: Strategy = ONE_DEVICE,
    progress: Progress = SILENT,
    routed: Routed | None = None,
) -> Mapping[str, Loads]:
    """Shares of all choices by expert, in the encoder and the decoder; {} for a dense model.

    `lengths` are those of a row's source and target; sentences that are longer are left out.
    `routed` counts the choices in a batch; by default the program is made here.
    """
    if not model.config.experts:
        return {}
    rows = -(-_ROWS // strategy.devices) * strategy.devices
    routed = routed or functools.partial(routing(strategy), model)
    step = progress.stage("expert loads", len(sets))
    loads: dict[str, Loads] = {}
    for held in sets:
        tokens = in_memory(tokenizer, held.task, held.sources, held.references)
        sums: dict[str, np.ndarray] = {}
        for arrays in batches_of(tokens, rows, *lengths)[:_BATCHES]:
            fields: Any = (arrays[name] for name in Batch._fields)  # NumPy's, which programs take
            found = routed(Batch(*fields))
            for name, load_LE in found.items():
                side = "source" if name == "encoder" else "target"
                weight = np.count_nonzero(arrays[f"{side}_segments"])
                sums[name] = sums.get(name, 0) + weight * np.asarray(load_LE, np.float64)
        for name, total_LE in sums.items():
            shares_LE = total_LE / np.maximum(total_LE.sum(axis=1, keepdims=True), 1e-9)
            loads.setdefault(name, {})[str(held.task)] = shares_LE.round(6).tolist()
        step(str(held.task))
    return loads


def routing(strategy: Strategy) -> Callable[[Transformer, Batch], dict[str, jax.Array]]:
    """The program that counts the choices in a batch, known to all processes."""

    def routed(model: Transformer, batch: Batch) -> dict[str, jax.Array]:
        model = strategy.weights(model, stacked=1)
        batch = jax.tree.map(strategy.groups, batch)
        _, metrics = model(batch, None, strategy, dropless=True)
        found = metrics._asdict().items()
        return {name: strategy.replicated(side.load) for name, side in found if side is not None}

    if strategy.devices == 1:
        return jax.jit(routed)
    return gshard.jit(routed, devices=jax.devices()[: strategy.devices])


def batches_of(
    tokens: TaskTokens, rows: int, source_length: int, target_length: int, least: int = 0
) -> list[Arrays]:
    """Every example of a task that fits, once, packed into `least` batches or more.

    Rows that are left over are empty. The rows come in the order of the first example in each, so
    that a few batches are a fair sample and not the longest sentences.
    """
    sources, targets = tokens.source.lengths, tokens.target.lengths
    fits = np.flatnonzero((sources <= source_length) & (targets <= target_length))
    packed = pack(sources[fits], targets[fits], source_length, target_length)
    ordered = sorted([(0, int(fits[i])) for i in sorted(row)] for row in packed)
    ordered += [[]] * max(-len(ordered) % rows, least * rows - len(ordered))
    return [
        fill(ordered[i : i + rows], [tokens], source_length, target_length, False)
        for i in range(0, len(ordered), rows)
    ]


LOAD, SEARCH, ROUTE = "load", "search", "route"


class _Loaded(NamedTuple):
    """A checkpoint on the devices, and what all processes run with it."""

    model: Transformer
    step: int
    translator: Translator
    routing: Callable[[Transformer, Batch], dict[str, jax.Array]]

    def route(self, batch: Batch) -> dict[str, np.ndarray]:
        """How often the experts were chosen in a batch."""
        return jax.tree.map(np.asarray, self.routing(self.model, batch))


@dataclass(frozen=True)
class Systems:
    """The checkpoints of a run as systems on so many devices (0: all)."""

    run: Run
    config: EvaluateConfig
    devices: int = 0
    broadcast: Broadcast = field(default_factory=Broadcast)
    engine: EngineConfig = EngineConfig("xla")  # noqa: RUF009  (frozen)

    def _loaded(self, which: str) -> _Loaded:
        run, strategy = self.run, hosts.strategy(DeviceConfig(self.devices))
        model, step = load_model(run, which, model_like(run.model_config, strategy))
        how: dict[str, Any] = {"broadcast": self.broadcast, "name": which}
        search = search_of(run, self.config)
        translator = Translator(model, run.tokenizer, strategy, search, **how)
        return _Loaded(model, step, translator, routing(strategy))

    def _opened(self, which: str, engine: EngineConfig) -> AnyTranslator:
        search = search_of(self.run, self.config)
        return open_translator(self.run, which, search, self.devices, engine=engine)[0]

    def system(self, which: str) -> System:
        """A checkpoint as a system, with the numbers that it has; it is read once, here."""
        run = self.run
        with self.broadcast.running(LOAD, which):
            loaded = self._loaded(which)
        model, strategy = loaded.model, loaded.translator.strategy
        lengths = (run.config.batch.source_length, run.config.batch.target_length)

        def routed(batch: Batch) -> dict[str, np.ndarray]:
            with self.broadcast.running(ROUTE, which, *map(np.asarray, batch)):
                return loaded.route(batch)

        def loads(sets: Sequence[HeldOut], progress: Progress) -> Mapping[str, Any]:
            return expert_loads(model, run.tokenizer, sets, lengths, strategy, progress, routed)

        def translator() -> AnyTranslator:
            engine, processes = replace(self.engine, numbers=""), Hosts(count=jax.process_count())
            if not on_host(engine, self.devices, processes, started=True):
                return loaded.translator
            return self._opened(which, engine)

        digest, weights = digest_of(model, run.tokenizer.digest), count_of(model)
        counted = loads if model.config.experts else None
        return System(loaded.step, digest, weights, translator, counted)

    def rounded(self, system: System) -> System:
        """The same checkpoint with its weights in the numbers of the engine, by one process."""
        numbers, count = self.engine.numbers, jax.process_count()
        if count > 1:
            raise UserError(f"--weights {numbers} is for one process, and there are {count}")
        opened = functools.partial(self._opened, self.config.checkpoint, self.engine)
        digest = f"{system.digest}-{numbers}"
        return replace(system, digest=digest, translator=opened, loads=None, numbers=numbers)

    def follow(self) -> None:
        """Do what the process that measures does, until it is done."""
        loaded: dict[str, _Loaded] = {}
        for message in self.broadcast.receive():
            if message.kind == LOAD:
                loaded[message.whose] = self._loaded(message.whose)
            elif message.kind == SEARCH:
                loaded[message.whose].translator.search(*message.arrays)
            else:
                arrays: Any = message.arrays  # NumPy's, which programs take
                loaded[message.whose].route(Batch(*arrays))
