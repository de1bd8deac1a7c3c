"""The budget of lines: what `python -m tools.structure --check` holds every package to.

The tables under "The budget" in `docs/design.md` are the budget: lines, files and modules without
a test file of their own for each part of the package, and how often code may do what it should not.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

PAGE = Path("docs/design.md")
_ROW = re.compile(r"^\| `(\w+)` \| ([\d,]+) \| (\d+) \| (\d+) \|$")
_HABIT = re.compile(r"^\| (?P<habit>[a-z][\w` .,-]+) \| (?P<most>\d+) \|$")
NOT_PARTITIONER = (
    "autosharding", "checking", "commands", "contrib", "explanation", "forecast", "models", "mt",
    "nn",
)  # fmt: skip


class Size(NamedTuple):
    """The size of a part: lines of Python, files, and modules without a test file of their own."""

    lines: int
    files: int
    untested: int


def parts(root: Path) -> dict[str, list[Path]]:
    """The files of each package of `gshard/`; those on top are the part `face`."""
    found: dict[str, list[Path]] = {}
    for path in sorted((root / "gshard").rglob("*.py")):
        names = path.relative_to(root / "gshard").parts
        found.setdefault(names[0] if len(names) > 1 else "face", []).append(path)
    return found


def untested(root: Path, paths: list[Path]) -> list[Path]:
    """The modules for which `tests/` has no `test_<module>.py` in the folder of their package."""
    missing = []
    for path in paths:
        names = path.relative_to(root / "gshard").parts
        folder = root / "tests" / (names[0] if len(names) > 1 else "")
        name = path.stem.removeprefix("_")
        if path.name != "__init__.py" and not any(folder.rglob(f"test_{name}.py")):
            missing.append(path)
    return missing


def size(root: Path, paths: list[Path]) -> Size:
    """The size of some files."""
    lines = sum(len(path.read_text().splitlines()) for path in paths)
    return Size(lines, len(paths), len(untested(root, paths)))


def sizes(root: Path) -> dict[str, Size]:
    """The size of every part, of the partitioner (without what stands above it), and of all."""
    found = parts(root)
    core = [p for name, paths in found.items() if name not in NOT_PARTITIONER for p in paths]
    every = [path for paths in found.values() for path in paths]
    whole = {name: size(root, paths) for name, paths in found.items()}
    return whole | {"partitioner": size(root, core), "all": size(root, every)}


def habits(root: Path) -> dict[str, int]:
    """How often the code does what it should rather not."""
    names = dictionaries = 0
    classes: Counter[str] = Counter()
    for path in sorted((root / "gshard").rglob("*.py")):
        tree = ast.parse(path.read_text())
        names += sum(map(_compares_names, ast.walk(tree)))
        classes.update({n.name.lstrip("_") for n in tree.body if isinstance(n, ast.ClassDef)})
        stages = path.relative_to(root / "gshard").parts[0] in ("planning", "rules")
        dictionaries += sum(map(_is_store, tree.body)) if stages else 0
    return {
        "class names that several modules define": sum(n > 1 for n in classes.values()),
        "comparisons with `primitive.name`": names,
        "module-level dictionaries that are written to, in `planning` and `rules`": dictionaries,
    }


def _compares_names(node: ast.AST) -> bool:
    return isinstance(node, ast.Compare) and any(
        isinstance(side, ast.Attribute)
        and side.attr == "name"
        and ast.unparse(side.value).endswith(("primitive", "prim"))
        for side in (node.left, *node.comparators)
    )


def _is_store(node: ast.stmt) -> bool:
    """`cache: dict[...] = {}` at the top of a module: empty, so filled while programs run."""
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    return isinstance(value, ast.Dict) and not value.keys


def read(root: Path) -> tuple[dict[str, Size], dict[str, int]]:
    """The budget, as the page has it."""
    rows, most = {}, {}
    for line in (root / PAGE).read_text().splitlines():
        if row := _ROW.match(line):
            rows[row[1]] = Size(*(int(number.replace(",", "")) for number in row.groups()[1:]))
        elif habit := _HABIT.match(line):
            most[habit["habit"]] = int(habit["most"])
    return rows, most


def excess(root: Path) -> list[str]:
    """Every budget that is exceeded, and every part that has none."""
    budget, most = read(root)
    found = []
    for part, now in sizes(root).items():
        if part not in budget:
            found.append(f'{part}: no row under "The budget" in {PAGE}')
            continue
        for what, count, limit in zip(Size._fields, now, budget[part], strict=True):
            if count > limit:
                found.append(f"{part}: {count:,} {what}, budget {limit:,}")
    for habit, count in habits(root).items():
        limit = most.get(habit, 0)
        if count > limit:
            found.append(f"{habit}: {count}, budget {limit}")
    return found


def table(root: Path) -> list[str]:
    """Today's sizes, as rows of the page's table."""
    rows = [
        f"| `{part}` | {now.lines:,} | {now.files} | {now.untested} |"
        for part, now in sizes(root).items()
    ]
    return rows + [f"| {habit} | {count} |" for habit, count in habits(root).items()]
