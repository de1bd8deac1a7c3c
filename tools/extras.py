"""`python -m tools.extras`: how many packages and megabytes each extra of gshard installs.

Counted from the files of the installed distributions, without a network. An extra with a package
that is not installed in this environment is named, and not counted. Below the table are the pairs
of extras that cannot be installed together.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


def requirements(project: dict[str, list[str]], extra: str) -> list[str]:
    """What gshard itself declares for an extra; the core for an empty name."""
    return project["optional-dependencies"][extra] if extra else project["dependencies"]


def needed(project: dict[str, list[str]], extra: str = "") -> set[str]:
    """The distributions that an extra installs, directly or through others, without gshard."""
    found: set[str] = set()
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [Requirement(line) for line in requirements(project, extra)]
    while waiting:
        wanted = waiting.pop()
        name, extras = canonicalize_name(wanted.name), frozenset(wanted.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        if name == "gshard":  # an extra that contains another
            waiting += [Requirement(r) for e in extras for r in requirements(project, e)]
            continue
        found.add(name)
        waiting += _active(importlib.metadata.requires(name) or (), extras)
    return found


def exclusive(project: dict[str, list[str]]) -> dict[tuple[str, str], str]:
    """The pairs of extras that exclude each other by what gshard declares; and the package."""
    found = {}
    own = {name: dict(_declared(project, name)) for name in project["optional-dependencies"]}
    for (one, ours), (other, theirs) in itertools.combinations(own.items(), 2):
        for package in ours.keys() & theirs.keys():
            both = ours[package] & theirs[package]
            if not any(both.contains(bound.version) for bound in both):  # lower bounds, among them
                found[one, other] = package
    return found


def _declared(project: dict[str, list[str]], extra: str) -> Iterator[tuple[str, SpecifierSet]]:
    """The packages that an extra names, itself or by another extra, with their versions."""
    for wanted in map(Requirement, requirements(project, extra)):
        if wanted.name == "gshard":
            for inner in wanted.extras:
                yield from _declared(project, inner)
        elif wanted.specifier:
            yield canonicalize_name(wanted.name), wanted.specifier


def _active(lines: Iterable[str], extras: Iterable[str]) -> list[Requirement]:
    """The requirements that apply to this Python and these extras."""
    parsed = map(Requirement, lines)
    return [
        r
        for r in parsed
        if r.marker is None or any(r.marker.evaluate({"extra": e}) for e in ("", *extras))
    ]


def size(name: str) -> int:
    """The bytes of a distribution's files."""
    files = importlib.metadata.files(name) or ()
    paths = (Path(str(file.locate())) for file in files)
    return sum(path.stat().st_size for path in paths if path.is_file())


def table() -> str:
    """The table that the command prints."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core = needed(project)
    own = [p for p in (ROOT / "gshard").rglob("*") if p.is_file() and p.suffix != ".pyc"]
    total = sum(path.stat().st_size for path in own) + sum(map(size, core))
    rows = [
        "| install | packages | size |",
        "|---|---:|---:|",
        f"| `gshard` | {len(core) + 1} | {total / 1e6:.0f} MB |",
    ]
    for extra in project["optional-dependencies"]:
        try:
            added = needed(project, extra) - core
        except importlib.metadata.PackageNotFoundError as missing:
            rows.append(f"| `gshard[{extra}]` | not counted: {missing.name} is missing here | |")
            continue
        megabytes = sum(map(size, added)) / 1e6
        rows.append(f"| `gshard[{extra}]` | + {len(added)} | + {megabytes:.0f} MB |")
    pairs = exclusive(project).items()
    rows += ["", *(f"`{a}` and `{b}` exclude each other: {package}" for (a, b), package in pairs)]
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
