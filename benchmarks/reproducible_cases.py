"""The programs of `benchmarks.reproducible`: recipes and a small MoE Transformer, to be trained."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import gshard
from benchmarks.recipes import NAMES
from examples.recipes.transformer import Size, shapes
from gshard.nn import Batch, Strategy, TransformerConfig, adafactor, init_state, train_step

SMALL = Size(L=1, B=24, S=24, M=192, N=8, F=384, V=192)  # 8 leaves in every contraction
# A model whose products fill their leaves and tiles of 64 rows and columns: for times alone.
LARGE = Size(L=1, B=24, S=64, M=1024, N=16, F=2048, V=1024)
SIZES = {"small": SMALL, "large": LARGE}
MOST = 8  # devices
MOE = "MoE Transformer"
FIRST = (MOE, "data parallel, Adam", "FSDP", "tensor parallel")  # to be measured
FLOAT32 = ("Fourier layers", "batch of Kalman filters")  # JAX has no narrower transform or solve
# The data of recipes whose sizes are not those of `SMALL`: 100 steps end within a minute, and sums
# over them have 8 leaves.
DATA = {"spatial convolutions": (2, 16, 48, 16), "batch of Kalman filters": (192, 8, 8)}
UNANNOTATED = ("split", "shard", "replicate", "mesh_split")


@dataclass(frozen=True)
class Case:
    """A training step, annotated for some devices, and its first arguments."""

    name: str
    devices: int
    step: Callable[..., Any]
    arguments: tuple[Any, ...]


def drawn(shape: jax.ShapeDtypeStruct, rng: np.random.Generator, dtype: Any) -> Any:
    """An argument of a recipe; its floats have the type `dtype`."""
    if shape.dtype == jnp.int8:  # weights, so small that no training diverges
        return rng.integers(-1, 2, shape.shape).astype(shape.dtype)
    if jnp.issubdtype(shape.dtype, jnp.integer):
        return rng.integers(0, 8, shape.shape).astype(shape.dtype)
    kind = dtype if shape.dtype == jnp.float32 else shape.dtype
    return np.asarray(rng.normal(size=shape.shape) / 8).astype(kind)


def without_annotations(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A step as for one device."""

    def step(*args: Any) -> Any:
        plain = {name: lambda x, *_, **__: x for name in UNANNOTATED if hasattr(gshard, name)}
        with mock.patch.multiple(gshard, **plain):
            return fn(*args)

    return step


def names(size: str = "small") -> list[str]:
    """All programs of a size: the large ones are those of the recipes' Transformer, and MoE."""
    with recipes_for(MOST) as modules:
        chosen = [m for m in modules if size == "small" or vars(m).get("shapes") is shapes]
        return [MOE, *(recipe.name for m in chosen for recipe in m.recipes(SIZES[size]))]


def types_of(name: str) -> list[str]:
    """The types of floats in which a program can be written."""
    return ["float32"] if name in FLOAT32 else ["float32", "bfloat16"]


def mesh_of(devices: int) -> np.ndarray:
    """What is a mesh of 2 x 4 on 8 devices."""
    rows = 2 if devices % 2 == 0 else 1
    return np.arange(devices).reshape(rows, -1)


@contextlib.contextmanager
def recipes_for(devices: int) -> Iterator[list[ModuleType]]:
    """The modules of all recipes, which know the devices as constants."""
    modules = [importlib.import_module(f"examples.recipes.{name}") for name in NAMES]
    constants = {"D": devices, "MESH": mesh_of(devices)}
    with contextlib.ExitStack() as stack:
        for module in modules:
            known = {name: value for name, value in constants.items() if hasattr(module, name)}
            if known:
                stack.enter_context(mock.patch.multiple(module, **known))
        yield modules


def recipe_on(devices: int, dtype: Any, name: str, size: Size) -> Case:
    """A recipe whose annotations are for so many devices; its sizes are those for `MOST`."""
    with recipes_for(MOST) as modules:
        (recipe,) = (r for m in modules for r in m.recipes(size) if r.name == name)

    def step(*args: Any) -> Any:
        with recipes_for(devices):
            return recipe.step(*args)

    *params, data = recipe.arguments
    if name in DATA:
        data = jax.ShapeDtypeStruct(DATA[name], data.dtype)
    rng = np.random.default_rng(0)
    arguments = jax.tree.map(lambda x: drawn(x, rng, dtype), [*params, data])
    for i, parameter in enumerate(inspect.signature(recipe.step).parameters):
        if parameter.startswith("moment"):  # an optimizer's, which begin with zeros
            arguments[i] = jax.tree.map(np.zeros_like, arguments[i])
    annotated = step if devices > 1 else without_annotations(step)
    return Case(name, devices, annotated, tuple(arguments))


def transformer_on(devices: int, dtype: Any, size: str) -> Case:
    """A training step of a MoE Transformer with dropout and random routing."""
    dims = {"model_dim": 48, "hidden_dim": 96, "heads": 4, "key_dim": 16, "value_dim": 16}
    if size == "large":
        dims = {"model_dim": 512, "hidden_dim": 1024, "heads": 8, "key_dim": 64, "value_dim": 64}
    length = {"small": 8, "large": 32}[size]
    dropout = {"input_dropout": 0.1, "residual_dropout": 0.1}
    config = TransformerConfig(
        64, 64, encoder_layers=2, decoder_layers=2, experts=24, groups=24, dispatch="einsum",
        dtype=dtype, **dims, **dropout,
    )  # fmt: skip
    optimizer = adafactor(0.3, warmup=1)
    rng = np.random.default_rng(0)
    tokens = [jnp.asarray(rng.integers(3, 64, (24, length)), jnp.int32) for _ in range(2)]
    state = jax.jit(lambda key: init_state(config, optimizer, key))(jax.random.key(0))

    strategy = Strategy(devices) if devices > 1 else Strategy()

    def step(state: Any, source: Any, target: Any) -> Any:
        batch = Batch.of(source, target)
        key = jax.random.key(7)
        return train_step(state, batch, key, optimizer=optimizer, strategy=strategy)

    return Case(MOE, devices, step, (state, *tokens))


def case_of(name: str, dtype: str, devices: int, size: str = "small") -> Case:
    """A program for so many devices."""
    if name == MOE:
        return transformer_on(devices, dtype, size)
    return recipe_on(devices, jnp.dtype(dtype), name, SIZES[size])
