"""Names of languages, and which can be translated into which."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import babel

from gshard.mt.batching.tokenizer import Task


@functools.cache
def language_name(code: str) -> str:
    """The English name of a language, such as "Portuguese (Brazil)"; its code if it has none."""
    plain, _, script = code.partition("@")
    try:
        name = babel.Locale.parse(plain.replace("-", "_")).get_display_name("en")
    except (ValueError, babel.UnknownLocaleError):
        name = babel.Locale("en").languages.get(plain)
    if not name:
        return code
    return f"{name} ({script})" if script else str(name)


def listed(tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """All languages by name, each with those that it is translated into."""
    targets: dict[str, set[str]] = {}
    for task in tasks:
        targets.setdefault(task.source, set()).add(task.target)
        targets.setdefault(task.target, set())
    found = (
        {"code": code, "name": language_name(code), "targets": sorted(into)}
        for code, into in targets.items()
    )
    return sorted(found, key=lambda language: (language["name"], language["code"]))
