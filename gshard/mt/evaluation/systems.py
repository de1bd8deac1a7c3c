"""The checkpoints of a run as systems, on the devices of one process or of several.

The first process measures (`evaluate`); the others hold their part of the weights and run what it
runs (`follow`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from gshard.mt import hosts
from gshard.mt.broadcast import Broadcast
from gshard.mt.config import DeviceConfig
from gshard.mt.decoding.engines import EngineConfig, on_host, open_translator
from gshard.mt.decoding.translator import Translator
from gshard.mt.errors import UserError
from gshard.mt.evaluation.evaluate import (
    EvaluateConfig,
    System,
    digest_of,
    search_of,
    weights_of,
)
from gshard.mt.evaluation.expert_loads import expert_loads, routing
from gshard.mt.evaluation.heldout import HeldOut
from gshard.mt.evaluation.store import AnyTranslator
from gshard.mt.launch.environment import Hosts
from gshard.mt.progress import Progress
from gshard.mt.run import Run
from gshard.mt.training.loading import load_model, model_like
from gshard.nn.config import Batch

LOAD, SEARCH, ROUTE = "load", "search", "route"


class _Loaded:
    """A checkpoint on the devices, and what all processes run with it."""

    def __init__(
        self, run: Run, which: str, config: EvaluateConfig, devices: int, broadcast: Broadcast
    ):
        self.strategy = hosts.strategy(DeviceConfig(devices))
        like = model_like(run.model_config, self.strategy)
        self.model, self.step = load_model(run, which, like)
        self.translator = Translator(
            self.model,
            run.tokenizer,
            self.strategy,
            search_of(run, config),
            broadcast=broadcast,
            name=which,
        )
        self._routing = routing(self.strategy)

    def route(self, batch: Batch) -> dict[str, np.ndarray]:
        """How often the experts were chosen in a batch."""
        return jax.tree.map(np.asarray, self._routing(self.model, batch))


def system_of(
    run: Run,
    which: str,
    config: EvaluateConfig,
    devices: int = 0,
    broadcast: Broadcast | None = None,
    engine: EngineConfig = EngineConfig("xla"),  # noqa: B008  (frozen)
) -> System:
    """A checkpoint of the run as a system on so many devices (0: all); it is read once, here."""
    broadcast = broadcast or Broadcast()
    with broadcast.running(LOAD, which):
        loaded = _Loaded(run, which, config, devices, broadcast)
    model = loaded.model
    lengths = (run.config.batch.source_length, run.config.batch.target_length)

    def routed(batch: Batch) -> dict[str, np.ndarray]:
        with broadcast.running(ROUTE, which, *map(np.asarray, batch)):
            return loaded.route(batch)

    def loads(sets: Sequence[HeldOut], progress: Progress) -> Mapping[str, Any]:
        strategy = loaded.strategy
        return expert_loads(model, run.tokenizer, sets, lengths, strategy, progress, routed)

    digest, weights = digest_of(model, run.tokenizer.digest), weights_of(model)
    counted = loads if model.config.experts else None

    def translator() -> AnyTranslator:
        if not on_host(engine, devices, Hosts(count=jax.process_count()), started=True):
            return loaded.translator
        return open_translator(run, which, search_of(run, config), devices, engine=engine)[0]

    return System(loaded.step, digest, weights, translator, counted)


def rounded_system(
    run: Run, system: System, config: EvaluateConfig, devices: int, engine: EngineConfig
) -> System:
    """The same checkpoint with its weights in the numbers of `engine`, by one process."""
    if jax.process_count() > 1:
        raise UserError(
            f"--weights {engine.numbers} is for one process, and there are {jax.process_count()}"
        )

    def translator() -> AnyTranslator:
        which, search = config.checkpoint, search_of(run, config)
        return open_translator(run, which, search, devices, engine=engine)[0]

    return replace(
        system,
        digest=f"{system.digest}-{engine.numbers}",
        translator=translator,
        loads=None,
        numbers=engine.numbers,
    )


def follow(run: Run, config: EvaluateConfig, devices: int, broadcast: Broadcast) -> None:
    """Do what the process that measures does, until it is done."""
    loaded: dict[str, _Loaded] = {}
    for message in broadcast.receive():
        if message.kind == LOAD:
            loaded[message.whose] = _Loaded(run, message.whose, config, devices, broadcast)
        elif message.kind == SEARCH:
            loaded[message.whose].translator.search(*message.arrays)
        else:
            arrays: Any = message.arrays  # NumPy's, which programs take
            loaded[message.whose].route(Batch(*arrays))
