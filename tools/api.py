"""docs/reference/api.md, made from the public names and their docstrings.

python -m tools.api --update
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_overloads

from typer.main import get_command

from gshard.cli import app

PAGE = Path("docs/reference/api.md")
MODULES = {  # whether each name has a section of its own, or a row
    "gshard": True,
    "gshard.manual": True,
    "gshard.forecast": True,
    "gshard.extend": True,
    "gshard.nn": False,
}
HEAD = """# What is public

Public are the names on this page, which `python -m tools.api --update` (in a checkout) makes from
the code. Every other module and every name that begins with an underscore is private, and may
change from one release to the next. `CHANGELOG.md` says what changes for users.
"""
COLUMNS = 96


def report() -> str:
    """The whole page."""
    parts = [HEAD]
    told: dict[int, str] = {}
    for name, whole in MODULES.items():
        module = importlib.import_module(name)
        parts.append(f"## `{name}`\n\n{_paragraphs(module)}\n")
        parts.append("\n".join(_sections(module, told) if whole else _rows(module)))
    parts.append("\n".join(_commands()))
    return "\n".join(parts).rstrip() + "\n"


def public(module: Any) -> Iterator[tuple[str, Any]]:
    """The public names of a module, functions first, then classes, then all others."""
    named = [(n, getattr(module, n)) for n in module.__all__ if not n.startswith("__")]
    kinds = (inspect.isroutine, inspect.isclass)
    yield from sorted(
        named, key=lambda item: (*(not kind(item[1]) for kind in kinds), item[0].lower())
    )


def _sections(module: Any, told: dict[int, str]) -> Iterator[str]:
    for name, value in public(module):
        if inspect.ismodule(value):
            yield f"`{name}`: see `{value.__name__}` below.\n"
        elif id(value) in told:
            yield f"`{name}`: see `{told[id(value)]}` above.\n"
        elif getattr(value, "__name__", "") == name:
            told[id(value)] = f"{module.__name__}.{name}"
            yield f"### `{name}`\n"
            if text := _signature(name, value):
                yield f"```text\n{text}\n```\n"
            yield f"{_paragraphs(value)}\n"
            if inspect.isclass(value) and (rows := list(_members(value))):
                yield "| member | what it is |\n|---|---|"
                yield "\n".join(rows) + "\n"
        else:
            yield f"`{name}` is the type\n`{_alias(value)}`.\n"


def _rows(module: Any) -> Iterator[str]:
    yield "| name | what it is |\n|---|---|"
    for name, value in public(module):
        if isinstance(value, dict):
            yield f"| `{name}` | {', '.join(f'`{key}`' for key in value)} |"
        else:
            yield f"| `{name}` | {_first_line(value)} |"
    yield ""


def _commands() -> Iterator[str]:
    yield "## The command `gshard`\n"
    yield "`auto`, `compare`, `doctor`, `explain`, `forecast` and `interval` need the extra"
    yield "`cli`, all others the extra `mt`. `--help` after any of them lists its options.\n"
    yield "| command | what it does |\n|---|---|"
    # Typer says that it returns a command; of an app with several it is a group.
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        for sub, each in getattr(command, "commands", {"": command}).items():
            yield f"| `gshard {name}{' ' if sub else ''}{sub}` | {each.help.splitlines()[0]} |"


def _members(cls: type) -> Iterator[str]:
    for name, value in inspect.getmembers(cls):
        shown = getattr(value, "fget", None) or getattr(value, "func", None) or value
        inside = getattr(shown, "__module__", "") or ""
        documented = inspect.isroutine(shown) and inside.startswith("gshard")
        if not name.startswith("_") and documented and inspect.getdoc(shown):
            brackets = "()" if shown is value else ""
            yield f"| `{name}{brackets}` | {_first_line(shown)} |"


def _signature(name: str, value: Any) -> str:
    """The call, on one line or a parameter on each."""
    if getattr(value, "_is_protocol", False):
        return ""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    parts: list[str] = []
    kinds: list[Any] = []
    for each in found.parameters.values():
        if kinds and kinds[-1] is each.POSITIONAL_ONLY is not each.kind:
            parts.append("/")
        if each.kind is each.KEYWORD_ONLY and not {each.kind, each.VAR_POSITIONAL} & {*kinds}:
            parts.append("*")
        kinds.append(each.kind)
        star = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        default = "" if each.default is each.empty else f" = {_shown(each.default)}"
        parts.append(f"{star}{each.name}{_annotation(each.annotation)}{default}")
    overloads = [] if inspect.isclass(value) else get_overloads(value)
    returned = inspect.signature(overloads[0] if overloads else value).return_annotation
    back = "" if inspect.isclass(value) else _annotation(returned, " -> ")
    line = f"{name}({', '.join(parts)}){back}"
    if len(line) <= COLUMNS:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){back}"


def _annotation(value: Any, before: str = ": ") -> str:
    if value is inspect.Signature.empty:
        return ""
    return before + (value if isinstance(value, str) else getattr(value, "__name__", str(value)))


def _shown(default: Any) -> str:
    return getattr(default, "__name__", None) or repr(default)


def _alias(value: Any) -> str:
    text = value.__name__ if inspect.isclass(value) else str(value)
    return re.sub(r"[\w.]+\.(\w)", r"\1", text)  # without modules, which are private


def _paragraphs(value: Any) -> str:
    text = inspect.getdoc(value)
    assert text, f"{value} has no docstring"
    return text


def _first_line(value: Any) -> str:
    return _paragraphs(value).split("\n\n")[0].replace("\n", " ").replace("|", "\\|")


def main() -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--update", action="store_true", help=f"write {PAGE}")
    if parser.parse_args().update:
        PAGE.write_text(report(), encoding="utf-8")
    else:
        print(report(), end="")


if __name__ == "__main__":
    main()
