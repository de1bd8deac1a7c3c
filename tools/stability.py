"""`python -m tools.stability --update`: the lists of docs/reference/stability.md, from the code.

Between releases the page only grows: a name that it lists and the code no longer has is an error.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from pathlib import Path

from typer.main import get_command

from gshard.cli import app

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "stability.md"
MODULES = ("gshard", "gshard.manual", "gshard.extend", "gshard.forecast", "gshard.nn")
ROW = re.compile(r"^\| `(gshard[\w.]*)` \| (.*) \|$", re.MULTILINE)
COMMANDS = re.compile(r"(?<=long options: ).*?(?=\.\n)", re.DOTALL)


def names(module: str) -> list[str]:
    """The public names of a module, the version aside."""
    return sorted(n for n in importlib.import_module(module).__all__ if n != "__version__")


def commands() -> list[str]:
    """All subcommands of `gshard`, those of groups with their group."""
    found = []
    # Typer says that it returns a command; of an app with several it is a group.
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        found += [f"{name} {sub}" for sub in inner] if inner else [name]
    return sorted(found)


def listed(text: str) -> dict[str, set[str]]:
    """What the page lists: names by module, and the commands."""
    found = {module: set(re.findall(r"`(\w+)`", row)) for module, row in ROW.findall(text)}
    match = COMMANDS.search(text)
    found["commands"] = set(re.findall(r"`([\w -]+)`", match[0])) if match else set()
    return found


def updated(text: str) -> str:
    """The page with present names."""

    def row(match: re.Match[str]) -> str:
        if match[1] not in MODULES:
            return match[0]
        return f"| `{match[1]}` | {', '.join(f'`{name}`' for name in names(match[1]))} |"

    text = ROW.sub(row, text)
    lines, width = [""], len("Subcommands, their arguments and long options: ")
    for word in (f"`{name}`," for name in commands()):
        if len(lines[-1]) + len(word) + 1 > 100 - (width if len(lines) == 1 else 0):
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return COMMANDS.sub(lambda _: "\n".join(lines).rstrip(","), text)


def main() -> None:
    """Compare the page with the code, or update it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--update", action="store_true", help="write the page")
    text = PAGE.read_text()
    if parser.parse_args().update:
        PAGE.write_text(updated(text))
    elif updated(text) != text:
        sys.exit("docs/reference/stability.md differs: python -m tools.stability --update")


if __name__ == "__main__":
    main()
