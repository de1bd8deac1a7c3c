"""Source files as they are loaded for one process: with a mutation, or with marks that are counted.

A block is a run of statements that are executed together: the body of a function, of a branch, of
a loop. `Loader` gives Python the code of some files in place of what is on disk, in this process
only, so that no file of the checkout is ever changed.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

_HITS = "_gshard_blocks_hit"


class Blocks:
    """The blocks of some files, numbered, and those that were executed."""

    def __init__(self, root: Path, files: Sequence[str]):
        self.spans: list[tuple[str, int, int]] = []  # file, first and last line
        self.codes: dict[str, CodeType] = {}
        self.hit: set[int] = set()
        for file in files:
            tree = ast.parse((root / file).read_text())
            self._mark(tree, file, inside=False)
            ast.fix_missing_locations(tree)
            self.codes[file] = compile(tree, str(root / file), "exec", dont_inherit=True)

    def note(self) -> dict[str, str]:
        """The blocks that were executed since the last note, one bit each."""
        mask = bytearray(len(self.spans) // 8 + 1)
        for number in self.hit:
            mask[number // 8] |= 1 << number % 8
        self.hit.clear()
        return {"blocks": mask[::-1].hex()}

    def _mark(self, node: ast.AST, file: str, inside: bool) -> None:
        """Put a mark before every block below `node`; module and class bodies have none."""
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            self._mark(child, file, inside)
        for field in ("body", "orelse", "finalbody"):
            body = getattr(node, field, None)
            if inside and isinstance(body, list) and body and isinstance(body[0], ast.stmt):
                number = len(self.spans)
                self.spans.append((file, body[0].lineno, body[-1].end_lineno or 0))
                mark = ast.parse(f"{_HITS}({number})").body[0]
                docstring = isinstance(body[0], ast.Expr) and isinstance(
                    body[0].value, ast.Constant
                )
                body.insert(1 if docstring else 0, ast.copy_location(mark, body[0]))


class Loader(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Finds modules whose code is given here; all others are found as ever."""

    def __init__(self, root: Path, codes: Mapping[str, CodeType], names: Mapping[str, Any]):
        self._paths = {module_name(file): root / file for file in codes}
        self._codes = {module_name(file): code for file, code in codes.items()}
        self._names = dict(names)

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's place, if its code is here."""
        if fullname not in self._codes:
            return None
        place = self._paths[fullname]
        folder = [str(place.parent)] if place.name == "__init__.py" else None
        loader = _Given(fullname, str(place), self._codes[fullname], self._names)
        return importlib.util.spec_from_file_location(
            fullname, place, loader=loader, submodule_search_locations=folder
        )


class _Given(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, code: CodeType, names: Mapping[str, Any]):
        super().__init__(name, path)
        self._code, self._given = code, names

    def get_code(self, fullname: str) -> CodeType:
        return self._code

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(self._given)
        super().exec_module(module)


def module_name(file: str) -> str:
    """`gshard/rules/__init__.py` is the module `gshard.rules`."""
    return file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def load(root: Path, codes: Mapping[str, CodeType], hit: set[int] | None = None) -> None:
    """From now on this process imports these files with that code."""
    sys.meta_path.insert(0, Loader(root, codes, {} if hit is None else {_HITS: hit.add}))
