"""Weights in one file that others can read: the safetensors format.

Nothing in it is executed when it is read. The library checks the header against the format: every
byte belongs to one array, and every array has the bytes of its shape.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from gshard.mt import atomic
from gshard.mt.errors import UserError

WEIGHTS = "weights.safetensors"
_DTYPES = {"F32": "float32", "BF16": "bfloat16"}


class Weights:
    """The arrays of a file by name, read when they are asked for, and its note."""

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
        self.shapes = {name: tuple(array.get_shape()) for name, array in arrays.items()}

    def __getitem__(self, name: str) -> np.ndarray:
        return self._file.get_tensor(name)

    def part(self, name: str, where: tuple[slice, ...]) -> np.ndarray:
        """A part of an array, as much of the file as that is."""
        if not where or 0 in self.shapes[name]:
            return self[name][where]
        return self._file.get_slice(name)[where]

    def not_finite(self) -> str:
        """The name of the first array with a value that is no number, or ""."""
        return next((name for name in self.shapes if not np.isfinite(self[name]).all()), "")


def _opened(path: Path) -> Any:
    """The library's file, of whose methods it does not tell the types."""
    return safe_open(path, framework="numpy")


def write_weights(path: Path, arrays: Mapping[str, Any], note: Mapping[str, str]) -> None:
    """Write arrays of float32 or bfloat16 by name, with a note, completely or not at all."""
    found = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    with atomic.new_file(path) as part:
        try:
            save_file(found, part, metadata=dict(note))
        except SafetensorError as error:
            if match := re.search(r"\(os error (\d+)\)", str(error)):  # a full disk, say
                raise OSError(int(match[1]), os.strerror(int(match[1])), str(path)) from None
            raise
