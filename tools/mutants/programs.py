"""Small programs, each with one operator whose line is known: what a mutant does shows in some.

`# here` marks the line that a wrong value comes from, if the program has any.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Made = tuple[Callable[..., Any], Sequence[np.ndarray], dict[str, Any]]


PROGRAMS: list[Program] = []


@dataclass(frozen=True)
class Program:
    """Makes a function, its arguments, and the keywords of `gshard.jit`.

    Nothing of JAX runs before it is made: processes fork until then.
    """

    name: str
    make: Callable[[], Made]
    file: str
    lines: Collection[int]  # those that may be named
    shows: Collection[str] = ()  # the mutants that it was written for, which meet it first


def _written(
    function: Callable[..., Any],
    arguments: Sequence[np.ndarray],
    number: int = 0,
    shows: Collection[str] = (),
    before: Callable[[], Any] = lambda: None,
    **keywords: Any,
) -> None:
    text, first = inspect.getsourcelines(function)
    lines = {first + n for n, line in enumerate(text) if "# here" in line}
    name, file = f"{function.__name__} {number}", inspect.getfile(function)

    def make() -> Made:
        before()
        return function, arguments, keywords

    PROGRAMS.append(Program(name, make, file, lines, shows))


def array(*shape: int, dtype: str = "float32") -> np.ndarray:
    """Random numbers."""
    rng = np.random.default_rng(shape)
    if dtype.startswith("int"):
        return rng.integers(-9, 10, size=shape).astype(dtype)
    return rng.normal(size=shape).astype(dtype)


def given(*arguments: np.ndarray, **keywords: Any) -> Callable[..., Any]:
    """A program of these arguments, with keywords of `gshard.jit`.

    `shows` are mutants that it was written for, `before` what is done first in its process.
    """

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        _written(function, arguments, **keywords)
        return function

    return add


def wide(*arguments: np.ndarray) -> Callable[..., Any]:
    """Arrays, and as many rows of more columns: many bytes are planned otherwise than few."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        _written(function, arguments)
        _written(function, [np.tile(x, (1, 400)) if x.ndim == 2 else x for x in arguments], 1)
        return function

    return add
