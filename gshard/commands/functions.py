"""Functions and shapes as they are named on the command line."""

from __future__ import annotations

import contextlib
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gshard.errors import UserError, nearest

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

    module, _, function = name.partition(":")
    if not function:
        raise ValueError(f"{name!r} is not the name of a function; write module:function")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name!r} cannot be imported: {error}") from None
    if not callable(found):
        raise ValueError(f"{name!r} is {found!r}, and not a function")
    return found


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """A context in which errors of a user's functions become one line that begins with theirs."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        where = _user_line(error)
        if not where and not isinstance(error, (ValueError, TypeError)):
            raise  # a defect of gshard, not of the function
        text = " ".join(str(error).split("\n--------------------")[0].split())
        raise UserError(text if where in text else f"{where}: {text}") from None


def _user_line(error: Exception) -> str:
    """The innermost line of an error that is neither Python's nor of what is installed."""
    from gshard.graph.source import shown_path

    paths = sysconfig.get_paths()
    installed = {paths["stdlib"], paths["purelib"], paths["platlib"], sys.prefix}
    others = [Path(__file__).parents[1], *map(Path, installed)]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_file() and not any(path.is_relative_to(other) for other in others):
            return f"{shown_path(frame.filename)}:{frame.lineno}"
    return ""


def arguments_of(shapes: Sequence[str] | None, function: str | None) -> tuple[Any, ...]:
    """The arguments of a function: by their shapes, or as `module:function` returns them."""
    if bool(shapes) == (function is not None):
        raise UserError("give the shapes of the arguments, or --arguments module:function")
    given = imported(function)() if function else [shape_of(s) for s in shapes or ()]
    return tuple(given) if isinstance(given, (tuple, list)) else (given,)


def use_virtual_devices(count: int) -> None:
    """Let JAX have `count` virtual CPU devices, on which XLA partitions without an accelerator."""
    import jax

    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # JAX has started, which it does once in a process
        if jax.device_count() != count:
            raise ValueError(
                f"JAX has {jax.device_count()} devices here, and not {count}"
            ) from None


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
