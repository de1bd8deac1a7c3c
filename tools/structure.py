"""`python -m tools.structure [ROOT]`: the parts of the package, and the imports between them.

With `--check` it prints only the budgets that are exceeded (`tools/budget.py`), the files and the
functions that are too long, and fails.

A part is a file or a package directly under `gshard/` or `gshard/mt/`. An arrow says that one part
imports another; it climbs back if it lies on a circle of arrows, since then no order of reading
meets every part before what is built on it. Files and functions above the limits are named too.
"""

from __future__ import annotations

import argparse
import ast
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

import grimp

from tools import budget

FOLDERS = ("gshard", "tests", "examples", "benchmarks", "tools")
SOURCES = (".py", ".js", ".css", ".html")
MOST_LINES_IN_A_FILE = 400
MOST_LINES_IN_A_FUNCTION = 60

Arrows = dict[str, set[str]]


def part(module: str) -> str:
    """The part that a module belongs to: `gshard.mt.data.clean` is in `mt.data`."""
    names = module.split(".")[1:]
    return ".".join(names[: 2 if names[:1] == ["mt"] else 1])


def imports(root: Path) -> Arrows:
    """Each module with the modules that it imports, at its top or inside functions."""
    sys.path.insert(0, str(root))
    try:
        graph = grimp.build_graph("gshard", cache_dir=None)
    finally:
        sys.path.remove(str(root))
    return {m: set(graph.find_modules_directly_imported_by(m)) for m in sorted(graph.modules)}


def arrows(root: Path) -> Arrows:
    """Each part with the parts that it imports; the public face, `gshard` itself, is left out."""
    modules = imports(root)
    found: Arrows = {part(module): set() for module in modules}
    for module, imported in modules.items():
        found[part(module)] |= {part(other) for other in imported}
    for face in ("", "mt"):
        found.pop(face, None)
    return {a: {b for b in bs if b in found and b != a} for a, bs in sorted(found.items())}


def reachable(found: Mapping[str, set[str]], start: str) -> set[str]:
    """Everything that a part imports, directly or through others."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        new = found[waiting.pop()] - seen
        seen |= new
        waiting.extend(new)
    return seen


def climbing(found: Mapping[str, set[str]]) -> list[tuple[str, str]]:
    """The arrows that lie on a circle."""
    reach = {a: reachable(found, a) for a in found}
    return [(a, b) for a in found for b in sorted(found[a]) if a in reach[b]]


def source_files(root: Path) -> Iterator[Path]:
    """The source files of the folders that the limits hold for."""
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in SOURCES and path.is_file():
                yield path


def long_files(root: Path) -> list[str]:
    """Files above the limit, with their lines."""
    lines = {path: len(path.read_text().splitlines()) for path in source_files(root)}
    return [
        f"{path.relative_to(root)}: {count}"
        for path, count in lines.items()
        if count > MOST_LINES_IN_A_FILE
    ]


def long_functions(root: Path) -> list[str]:
    """Functions above the limit, with their lines, decorators not counted."""
    found = []
    for path in source_files(root):
        if path.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count = (node.end_lineno or node.lineno) - node.lineno + 1
                if count > MOST_LINES_IN_A_FUNCTION:
                    found.append(f"{path.relative_to(root)}:{node.lineno} {node.name}: {count}")
    return found


def report(root: Path) -> str:
    """The text that the command prints."""
    found = arrows(root)
    width = max(map(len, found)) + 2
    lines = []
    for a, bs in found.items():
        row = f"{a:{width}}{' '.join(sorted(bs))}".rstrip()
        lines += textwrap.wrap(row, 96, subsequent_indent=" " * width, break_on_hyphens=False)
    inside_mt = sum(len(bs) for a, bs in found.items() if a.startswith("mt."))
    total = sum(map(len, found.values()))
    lines += ["", f"{total} arrows between {len(found)} parts, {inside_mt} of them from mt"]
    lines += ["", *budget.table(root), ""]
    for title, items in (
        ("arrows that climb back", [f"{a} -> {b}" for a, b in climbing(found)]),
        (f"files above {MOST_LINES_IN_A_FILE} lines", long_files(root)),
        (f"functions above {MOST_LINES_IN_A_FUNCTION} lines", long_functions(root)),
    ):
        lines += [f"{title}: {len(items) or 'none'}", *(f"  {item}" for item in items)]
    return "\n".join(lines) + "\n"


def excess(root: Path) -> list[str]:
    """What `make lint` refuses."""
    return budget.excess(root) + long_files(root) + long_functions(root)


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", nargs="?", type=Path, default=Path.cwd())
    parser.add_argument("--check", action="store_true", help="only what is too much")
    options = parser.parse_args()
    root = options.root.resolve()
    if not options.check:
        print(report(root), end="")
    elif found := excess(root):
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
