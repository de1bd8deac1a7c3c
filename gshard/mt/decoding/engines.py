"""Which engine searches: the compiled program of XLA, or ONNX Runtime's products on a CPU."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from gshard.errors import UserError, one_of
from gshard.mt.broadcast import Broadcast
from gshard.mt.config import DeviceConfig
from gshard.mt.decoding.texts import TextTranslator, TranslateConfig
from gshard.mt.launch.environment import Hosts
from gshard.mt.training import weights as files
from gshard.nn.config import Int8

if TYPE_CHECKING:
    from gshard.mt.decoding.host.translator import Load
    from gshard.mt.run import Run

Engine = Literal["auto", "onnx", "xla"]
ENGINES: tuple[Engine, ...] = ("auto", "onnx", "xla")
Numbers = Literal["", "float32", "int8"]
NUMBERS: tuple[Numbers, ...] = ("", "float32", "int8")


@dataclass(frozen=True)
class EngineConfig:
    """The inference engine: `auto` is ONNX Runtime on one CPU if it is installed, XLA elsewhere.

    `numbers` are those of the weights, "" those that a run or release has: float32 is for ONNX
    Runtime alone. `threads` are its threads, 0 one for each processor.
    """

    engine: Engine = "auto"
    numbers: Numbers = ""
    threads: int = 0


def engine_of(engine: str, numbers: str, threads: int) -> EngineConfig:
    """The configuration of options; an error that names what is allowed."""
    kind = one_of("--weights", numbers, NUMBERS[1:]) if numbers else ""
    return EngineConfig(one_of("--engine", engine, ENGINES), kind, threads)


def open_translator(
    run: Run,
    which: str = "best",
    config: TranslateConfig = TranslateConfig(),  # noqa: B008  (frozen)
    devices: int = 0,
    members: Hosts = Hosts(),  # noqa: B008  (frozen)
    broadcast: Broadcast | None = None,
    engine: EngineConfig = EngineConfig(),
) -> tuple[TextTranslator, int]:
    """The translator of a run on so many devices (0: all), and the step of its weights."""
    if on_host(engine, devices, members):
        return _host_translator(run, which, config, broadcast, engine)

    import jax

    from gshard.mt import hosts
    from gshard.mt.decoding.translator import Translator
    from gshard.mt.training.loading import in_int8, load_model, model_like

    settings = {
        "--devices": devices, "--checkpoint": which, "--weights": engine.numbers,
        **asdict(config), **run.of_model,
    }  # fmt: skip
    # More virtual devices would share the same cores.
    hosts.start(devices, members, virtual=members.count, settings=settings)
    if on_host(engine, devices, members, started=True):
        return _host_translator(run, which, config, broadcast, engine)
    hosts.cache_programs()
    strategy, dims = hosts.strategy(DeviceConfig(devices)), run.model_config
    if engine.numbers == "float32":
        raise UserError("--weights float32 is for --engine onnx; --engine xla has int8")
    if engine.numbers and strategy.devices > 1:
        raise UserError(
            f"--weights {engine.numbers} is for one device, and there are {strategy.devices}; "
            "--devices 1 takes one"
        )
    if engine.numbers and jax.default_backend() != "cpu":
        dims = replace(dims, dtype="bfloat16")  # which matrix units take, beside 8 bits
    model, step = load_model(run, which, model_like(dims, strategy))
    if engine.numbers:
        model = in_int8(model)
    return Translator(model, run.tokenizer, strategy, config, broadcast=broadcast), step


def on_host(
    engine: EngineConfig,
    devices: int = 0,
    members: Hosts = Hosts(),  # noqa: B008  (frozen)
    *,
    started: bool = False,
) -> bool:
    """Whether ONNX Runtime searches: where `started`, JAX may be asked what it runs on."""
    why = _not_on_host(devices, members)
    if engine.engine == "onnx" and why:
        raise UserError(f"--engine onnx cannot be used: {why}")
    if engine.engine != "auto" or why:
        return engine.engine == "onnx"
    if not started:
        return only_cpus()
    import jax

    return jax.default_backend() == "cpu"


def _not_on_host(devices: int, members: Hosts) -> str:
    """Why ONNX Runtime cannot search, or ""."""
    missing = [name for name in ("onnx", "onnxruntime") if not importlib.util.find_spec(name)]
    reasons = (
        (bool(missing), f"{' and '.join(missing)} is not installed (the extra `mt` has it)"),
        (members.count > 1, f"it is for one process, and there are {members.count}"),
        (devices > 1, f"it is for one device, and --devices is {devices}"),
    )
    return next((reason for holds, reason in reasons if holds), "")


def only_cpus() -> bool:
    """Whether it is certain, without importing JAX, that it would find nothing but CPUs."""
    if platforms := os.environ.get("JAX_PLATFORMS"):
        return platforms == "cpu"
    return not (
        any(name in os.environ for name in ("PJRT_NAMES_AND_LIBRARY_PATHS", "TPU_LIBRARY_PATH"))
        or any(importlib.util.find_spec(name) for name in ("jax_plugins", "libtpu"))
        or importlib.metadata.entry_points(group="jax_plugins")
    )


def _host_translator(
    run: Run, which: str, config: TranslateConfig, broadcast: Broadcast | None, engine: EngineConfig
) -> tuple[TextTranslator, int]:
    from gshard.mt.decoding.host.products import floats, use_threads
    from gshard.mt.decoding.host.translator import HostModel, HostTranslator

    use_threads(engine.threads)
    load, weights, step = _weights(run, which)
    numbers = engine.numbers

    def converted(name: str) -> np.ndarray | Int8:
        found, axes = load(name), files.summed_axes(name)
        some = found.scale if isinstance(found, Int8) else found  # integers are finite
        if not np.isfinite(some).all():
            raise UserError(files.not_finite(run, name))
        if isinstance(found, Int8) and numbers != "float32":
            return found
        return Int8.of(found, axes) if numbers == "int8" and axes else floats(found)

    model = HostModel(run.model_config, converted, weights)
    return HostTranslator(model, run.tokenizer, config, broadcast), step


def _weights(run: Run, which: str) -> tuple[Load, int, int]:
    """The weights by name as they are stored, how many there are, and their step."""
    if not files.is_release(run) or which == "untrained":
        from gshard.mt.training.loading import load_model

        model, step = load_model(run, which)
        arrays = files.named(model)
        return lambda name: np.asarray(arrays[name]), files.count_of(model), step
    step = files.opened_release(run, which)
    weights = files.WeightsFile(run.folder / files.WEIGHTS)
    return weights.stored, sum(map(math.prod, weights.shapes.values())), step
