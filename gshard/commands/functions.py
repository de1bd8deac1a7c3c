"""Functions and shapes as they are named on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gshard.errors import nearest

_DTYPES = {
    **{f"f{n}": f"float{n}" for n in (16, 32, 64)},
    **{f"i{n}": f"int{n}" for n in (8, 16, 32, 64)},
    **{f"u{n}": f"uint{n}" for n in (8, 16, 32, 64)},
    "bf16": "bfloat16",
    "bool": "bool",
    "c64": "complex64",
}


def imported(name: str) -> Any:
    """A function by `module:function`, from the working folder or what is installed."""
    import importlib
    import sys

    module, _, function = name.partition(":")
    if not function:
        raise ValueError(f"{name!r} is not the name of a function; write module:function")
    sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name!r} cannot be imported: {error}") from None


def shape_of(text: str) -> Any:
    """An array's type, such as `f32[8,256,128]`."""
    import re

    import jax

    match = re.fullmatch(r"([a-z]+\d*)\[([\d,\s]*)\]", text)
    if match is None:
        raise ValueError(f"{text!r} is not a shape; write a dtype and sizes, as in f32[8,256,128]")
    if match[1] not in _DTYPES:
        raise ValueError(
            f"the dtype of {text!r} is {match[1]!r}; allowed are {', '.join(_DTYPES)}"
            f"{nearest(match[1], _DTYPES)}"
        )
    sizes = [int(n) for n in match[2].split(",") if n.strip()]
    return jax.ShapeDtypeStruct(tuple(sizes), _DTYPES[match[1]])
