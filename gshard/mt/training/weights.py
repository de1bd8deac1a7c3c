"""Weights in one file that others can read: the safetensors format.

Nothing in it is executed when it is read. The library checks the header against the format: every
byte belongs to one array, and every array has the bytes of its shape.

Weights may be in 8 bits: integers of -127 to 127, and a scale for each output of a product. What a
product sums over shares a scale, of every expert by itself, since a scale can be applied after the
sum. In the embeddings each token has one, which serves the lookup and the logits. Normalization and
routers keep their numbers: they are small, and a router's choices depend on them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from gshard.mt import atomic
from gshard.mt.errors import UserError

WEIGHTS = "weights.safetensors"
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "I8": "int8"}
MOST = 127  # symmetric: -128 is not used
_SCALE = ".scale_of_8_bits"  # what an array's integers are multiplied by, under its name and this


@dataclass(frozen=True)
class Quantized:
    """An array of `values * scale`; `scale` has size 1 in the dims that share one."""

    values: np.ndarray  # int8
    scale: np.ndarray  # float32

    def __getitem__(self, index: int) -> Quantized:
        """One of the arrays that are stacked in dim 0: of a layer, or of an expert."""
        return Quantized(self.values[index], self.scale[index])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""
        return self.values.shape

    def reshape(self, *shape: int) -> Quantized:
        """Other dims for the values; the scales, one for each entry of the last, in one row."""
        return Quantized(self.values.reshape(shape), self.scale.reshape(1, -1))

    def dequantized(self) -> np.ndarray:
        """The array in float32."""
        return self.values.astype(np.float32) * self.scale


def summed_axes(name: str) -> tuple[int, ...] | None:
    """The axes, from the end, that products with this weight sum over; None: it stays in floats."""
    *parents, leaf = name.split(".")
    if leaf == "table":
        return (-1,)
    attention = any(parent.endswith("attention") for parent in parents)
    if leaf in ("wq", "wk", "wv"):
        return (-3,)
    if leaf in ("wi", "wo"):
        return (-3, -2) if attention else (-2,)
    return None


def quantize(array: np.ndarray, axes: tuple[int, ...]) -> Quantized:
    """The nearest numbers of 8 bits, with one scale along `axes`."""
    array = np.asarray(array, np.float32)
    largest = np.abs(array).max(axis=axes, keepdims=True)
    scale = np.where(largest > 0, largest / MOST, 1.0).astype(np.float32)
    return Quantized(np.rint(array / scale).astype(np.int8), scale)


class WeightsFile:
    """The arrays of a file by name, read when they are asked for, and its note.

    An array in 8 bits is read as the numbers that it stands for; `stored` gives the integers.
    """

    def __init__(self, path: Path):
        try:
            atomic.refuse_special(path)
            self._file = _opened(path)
            self.note: dict[str, str] = self._file.metadata() or {}
            arrays = {name: self._file.get_slice(name) for name in self._file.offset_keys()}
        except FileNotFoundError:
            raise UserError(f"{path} is missing") from None
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is damaged: {error}") from None
        for name, array in arrays.items():
            if array.get_dtype() not in _DTYPES:
                kinds = " or ".join(_DTYPES)
                raise UserError(f"{path}: {name} holds {array.get_dtype()}, and not {kinds}")
            if (array.get_dtype() == "I8") != (f"{name}{_SCALE}" in arrays):
                raise UserError(f"{path}: {name} and its scale do not belong together")
        shapes = {name: tuple(array.get_shape()) for name, array in arrays.items()}
        self.shapes = {name: s for name, s in shapes.items() if not name.endswith(_SCALE)}
        self._scales = {name: shapes[name + _SCALE] for name in shapes if name + _SCALE in shapes}
        for name, scale in self._scales.items():
            if not _broadcasts(scale, self.shapes[name]):
                raise UserError(f"{path}: {name} and its scale are not of one shape")

    def __getitem__(self, name: str) -> np.ndarray:
        found = self.stored(name)
        return found.dequantized() if isinstance(found, Quantized) else found

    def stored(self, name: str) -> np.ndarray | Quantized:
        """An array as it is in the file."""
        values = self._file.get_tensor(name)
        if name not in self._scales:
            return values
        return Quantized(values, self._file.get_tensor(name + _SCALE))

    def part(self, name: str, where: tuple[slice, ...]) -> np.ndarray:
        """A part of an array, as much of the file as that is."""
        if not where or 0 in self.shapes[name]:
            return self[name][where]
        values = self._file.get_slice(name)[where]
        if name not in self._scales:
            return values
        shared = zip(where, self._scales[name], strict=False)
        along = tuple(slice(None) if size == 1 else part for part, size in shared)
        return Quantized(values, self._file.get_tensor(name + _SCALE)[along]).dequantized()

    def not_finite(self) -> str:
        """The name of the first array with a value that is no number, or ""."""
        return next((name for name in self.shapes if not np.isfinite(self[name]).all()), "")


def _broadcasts(scale: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a scale has the dims of an array, or 1."""
    return len(scale) == len(shape) and all(
        one in (1, size) for one, size in zip(scale, shape, strict=True)
    )


def _opened(path: Path) -> Any:
    """The library's file, of whose methods it does not tell the types."""
    return safe_open(path, framework="numpy")


def write_weights(path: Path, arrays: Mapping[str, Any], note: Mapping[str, str]) -> None:
    """Write arrays by name, with a note, completely or not at all.

    They are of float32 or bfloat16, or `Quantized`.
    """
    found = {}
    for name, array in arrays.items():
        if isinstance(array, Quantized):
            found[name + _SCALE] = np.ascontiguousarray(array.scale)
            array = array.values
        found[name] = np.asarray(array, order="C")
    with atomic.new_file(path) as part:
        try:
            save_file(found, part, metadata=dict(note))
        except SafetensorError as error:
            if match := re.search(r"\(os error (\d+)\)", str(error)):  # a full disk, say
                raise OSError(int(match[1]), os.strerror(int(match[1])), str(path)) from None
            raise
