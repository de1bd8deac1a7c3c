"""Weights in one file that others can read: the safetensors format, by hand.

The file is the length of a header in 8 bytes, the header in JSON (for each array its dtype, shape
and place), and the arrays one after another. Nothing in it is executed when it is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from gshard.mt import atomic
from gshard.mt.errors import UserError

WEIGHTS = "weights.safetensors"
_DTYPES: dict[str, Any] = {"F32": np.float32, "BF16": ml_dtypes.bfloat16}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
_LONGEST = 100_000_000  # bytes of a header, as the format allows


def write_weights(path: Path, arrays: Mapping[str, Any], note: Mapping[str, str]) -> None:
    """Write arrays of float32 or bfloat16 by name, with a note, whole or not at all."""
    header: dict[str, Any] = {"__metadata__": dict(note)}
    first = 0
    found = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    for name, array in found.items():
        end = first + array.nbytes
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [first, end],
        }
        first = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the arrays are aligned
    with atomic.new_file(path) as part, part.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in found.values():
            file.write(array.tobytes())


def read_weights(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays of a file by name, mapped into memory, and its note."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if not 0 < size <= _LONGEST:
                raise ValueError("it does not begin with the length of a header")
            header = dict(json.loads(file.read(size)))
        data = np.memmap(path, np.uint8, "r", offset=8 + size)
        note = dict(header.pop("__metadata__", {}))
        return {name: _array(data, entry) for name, entry in header.items()}, note
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UserError(f"{path} is damaged: {error}") from None


def _array(data: np.ndarray, entry: Mapping[str, Any]) -> np.ndarray:
    dtype, shape = np.dtype(_DTYPES[entry["dtype"]]), tuple(map(int, entry["shape"]))
    first, end = map(int, entry["data_offsets"])
    if not 0 <= first <= end <= len(data) or end - first != math.prod(shape) * dtype.itemsize:
        raise ValueError("an array does not lie where its header says")
    return data[first:end].view(dtype).reshape(shape)
