"""Programs after a rewrite that depends on shardings, as text."""

import re
from collections.abc import Callable
from typing import Any

import gshard


def rewritten(name: str, fn: Callable, *arguments: Any, memory_limit: int = 64) -> list[str]:
    """The lines that a rewrite has changed, and its remarks, without the names of files."""
    lowered = gshard.jit(fn, memory_limit=memory_limit).lower(*arguments)
    (text,) = [text for title, text in lowered._program.history.texts().items() if name in title]
    lines = [line for line in text.split("\n") if line[0] in "#>"]
    return [re.sub(r"at \S*/(\w+\.py):\d+", r"at \1", line) for line in lines]
