"""`python -m tools.walks`: the way of one value through the files of the package, counted.

A walk starts at a parameter of a function and follows, in the order of the source, the calls that
it is passed to, and those that are passed what they return. A *stay* is a stop in one file; a
*return* is a stop in a file that the walk had left already. Calls that are chosen while a program
runs (a field that holds a function, a method that several classes have) are not followed, nor are
those of other libraries (`jnp.sum`, where one class of the package has a method `sum`).
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Start(NamedTuple):
    """Where a walk begins, and its limits."""

    module: str
    function: str
    parameter: str
    stays: int
    returns: int


# Limits are those of today's code: a change that needs more of a walk takes it from elsewhere.
WALKS = {
    "lower": Start("gshard.runtime.pipeline", "lower", "traced", 12, 0),
    "forecast": Start("gshard.forecast.report", "forecast", "jaxpr", 20, 5),
    "auto": Start("gshard.autosharding.cost.model", "ModelBuilder.__init__", "subject", 13, 2),
    "training": Start("gshard.mt.training.loop", "train", "run", 33, 12),
}

# Methods of values of any kind, arrays among them.
BUILT_IN = {name for kind in (dict, list, set, str, tuple, np.ndarray) for name in dir(kind)}


@dataclass
class Module:
    """A module's functions and classes, and the names that it imports."""

    name: str
    path: Path

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax."""
        return ast.parse(self.path.read_text())

    @cached_property
    def functions(self) -> dict[str, ast.FunctionDef]:
        """By name; methods as `Class.method`."""
        found = {}
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef):
                found[node.name] = node
            elif isinstance(node, ast.ClassDef):
                methods = [n for n in node.body if isinstance(n, ast.FunctionDef)]
                found |= {f"{node.name}.{method.name}": method for method in methods}
        return found

    @cached_property
    def libraries(self) -> set[str]:
        """Names of this module for what is not of the package: `jax`, `jnp`, `Path`."""
        found = {name for name, (source, _) in self.imported.items() if source[:6] != "gshard"}
        imports = [node for node in ast.walk(self.tree) if isinstance(node, ast.Import)]
        names = [alias.asname or alias.name for node in imports for alias in node.names]
        return found | {name.split(".")[0] for name in names} - {"gshard"}

    @cached_property
    def imported(self) -> dict[str, tuple[str, str]]:
        """Names of this module, as a module and a name in it."""
        found = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    found[alias.asname or alias.name] = (node.module, alias.name)
        return found


@dataclass
class Package:
    """All modules of a package."""

    root: Path
    modules: dict[str, Module] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for path in sorted((self.root / "gshard").rglob("*.py")):
            names = path.relative_to(self.root).with_suffix("").parts
            name = ".".join(names[:-1] if names[-1] == "__init__" else names)
            self.modules[name] = Module(name, path)

    @cached_property
    def methods(self) -> dict[str, list[tuple[Module, str]]]:
        """By the name of a method, the classes that have it."""
        found: dict[str, list[tuple[Module, str]]] = {}
        for module in self.modules.values():
            for name in module.functions:
                if "." in name:
                    found.setdefault(name.split(".")[1], []).append((module, name))
        return found

    def find(self, module: Module, name: str) -> tuple[Module, str] | None:
        """The function, or the initializer of the class, that a name of a module refers to."""
        for candidate in (name, f"{name}.__init__"):
            if candidate in module.functions:
                return module, candidate
        if name in module.imported:
            source, original = module.imported[name]
            if source in self.modules and self.modules[source] is not module:
                return self.find(self.modules[source], original)
        return None

    def callee(self, module: Module, inside: str, call: ast.Call) -> tuple[Module, str] | None:
        """The function of the package that a call runs, if it can be read from the source."""
        if _root(call.func) in module.libraries:
            return None
        match call.func:
            case ast.Name(id=name):
                return self.find(module, name)
            case ast.Attribute(value=ast.Name(id=owner), attr=name):
                if owner in ("self", "cls") and "." in inside:
                    own = f"{inside.split('.')[0]}.{name}"
                    if own in module.functions:
                        return module, own
                if owner in module.imported:
                    source, original = module.imported[owner]
                    inner = self.modules.get(f"{source}.{original}")
                    if inner is not None:
                        return self.find(inner, name)
                return self._only_method(name)
            case ast.Attribute(attr=name):
                return self._only_method(name)
        return None

    def _only_method(self, name: str) -> tuple[Module, str] | None:
        found = [] if name in BUILT_IN else self.methods.get(name, [])
        return found[0] if len(found) == 1 else None


@dataclass
class Walk:
    """The files that a value passes through, in order."""

    package: Package
    route: list[str] = field(default_factory=list)
    _seen: set[tuple[str, str, str]] = field(default_factory=set)

    def enter(self, module: Module, function: str, parameter: str) -> None:
        """Follow a parameter into a function, once."""
        if (module.name, function, parameter) in self._seen:
            return
        self._seen.add((module.name, function, parameter))
        name = str(module.path.relative_to(self.package.root / "gshard"))
        if not self.route or self.route[-1] != name:
            self.route.append(name)
        followed = {parameter}
        for node in _in_order(module.functions[function]):
            if isinstance(node, ast.Call):
                self._call(module, function, node, followed)
            elif isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if _is_passed(node.value, followed):
                    followed |= {n.id for t in targets for n in ast.walk(t) if _is_name(n)}
            elif isinstance(node, ast.For | ast.comprehension) and _is_passed(node.iter, followed):
                followed |= {n.id for n in ast.walk(node.target) if _is_name(n)}

    def _call(self, module: Module, function: str, call: ast.Call, followed: set[str]) -> None:
        place = self.package.callee(module, function, call)
        if place is None:
            return
        target, name = place
        spec = target.functions[name].args
        names = [a.arg for a in (*spec.posonlyargs, *spec.args)]
        static = any(_called(d) == "staticmethod" for d in target.functions[name].decorator_list)
        names = names[1:] if "." in name and not static else names
        given = dict(zip(names, call.args, strict=False))
        given |= {k.arg: k.value for k in call.keywords if k.arg}
        for parameter, value in given.items():
            if _is_passed(value, followed):
                self.enter(target, name, parameter)

    @property
    def stays(self) -> int:
        """Stops in a file."""
        return len(self.route)

    @property
    def returns(self) -> int:
        """Stops in a file that the walk had left."""
        return len(self.route) - len(set(self.route))


def _is_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id != "self"


def _called(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _root(node: ast.expr) -> str:
    """The name that an attribute is looked up from: `jax` in `jax.tree.map`."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _is_passed(value: ast.expr, followed: set[str]) -> bool:
    """Whether an expression is the value, a part of it, or what a call that takes it returns."""
    match value:
        case ast.Name(id=name):
            return name in followed
        case ast.Attribute(value=inner) | ast.Starred(value=inner) | ast.Subscript(value=inner):
            return _is_passed(inner, followed)
        case ast.Call(args=args, keywords=keywords):
            return any(_is_passed(a, followed) for a in [*args, *(k.value for k in keywords)])
        case ast.Tuple(elts=elements):
            return any(_is_passed(e, followed) for e in elements)
    return False


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    """What is inside, operands before the call or assignment that takes them."""
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.GeneratorExp | ast.ListComp | ast.SetComp | ast.DictComp):
        children.sort(key=lambda child: not isinstance(child, ast.comprehension))
    if isinstance(node, ast.For | ast.comprehension):  # its names are bound before its body
        yield from _in_order(node.iter)
        yield node
        for child in children:
            if child is not node.iter:
                yield from _in_order(child)
        return
    for child in children:
        yield from _in_order(child)
    yield node


def walk(package: Package, start: Start) -> Walk:
    """The walk from a start."""
    found = Walk(package)
    found.enter(package.modules[start.module], start.function, start.parameter)
    return found


def main() -> None:
    """Print the walks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", nargs="?", type=Path, default=Path.cwd())
    parser.add_argument("--route", action="store_true", help="the files, in order")
    options = parser.parse_args()
    package = Package(options.root.resolve())
    for name, start in WALKS.items():
        found = walk(package, start)
        print(f"{name:14}{found.stays:4} stays {found.returns:4} returns")
        if options.route:
            print("\n".join(f"    {place}" for place in found.route))


if __name__ == "__main__":
    main()
