"""What the user's source calls a value: the name that a statement assigns, or its expression.

Equations know where in the source they come from, columns included; the text there has the names.
"""

from __future__ import annotations

import ast
import functools
import linecache
import re
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.extend.core.primitives import scan_p

from gshard.graph.regions import LOOPS, bodies, counts_of
from gshard.graph.source import phase_of, span_of

_LONGEST = 44  # characters of an expression that are shown
_Span = tuple[int, int, int, int]


@dataclass(frozen=True)
class _Expression:
    """The statement of an equation, and the expression in it."""

    statement: tuple[str, int, str]  # file, line and the name that is assigned
    start: tuple[int, int]
    end: tuple[int, int]

    def is_in(self, other: _Expression) -> bool:
        """Whether this is a part of the other expression, or the same one.

        A part is evaluated before the expression around it. What a part reads of the expression
        around it is of an earlier run of the statement.
        """
        inside = other.start <= self.start and self.end <= other.end
        return self.statement == other.statement and inside


class Statements:
    """A program or the body of a loop: its statements, and what belongs to a gradient.

    Gradients, and what is stored for them alone, have the place in the source of the values that
    they are gradients of.
    """

    def __init__(self, jaxpr: Jaxpr, in_gradient: bool = False, unread: Set[int] = frozenset()):
        self.jaxpr, self._in_gradient = jaxpr, in_gradient
        needed = set(variables(a for n, a in enumerate(jaxpr.outvars) if n not in unread))
        self.stored: set[Any] = set()  # made in the forward pass, read in the backward pass alone
        self._places: dict[Any, _Expression] = {}
        self._read_within: set[Any] = set()
        forward = [eqn for eqn in jaxpr.eqns if not self.is_gradient(eqn)]
        for eqn in forward:
            if (place := _place(eqn)) is not None:
                self._places.update(dict.fromkeys(eqn.outvars, place))
        for eqn in reversed(forward):
            self._read(eqn, needed)

    def _read(self, eqn: JaxprEqn, needed: set[Any]) -> None:
        """Add what an equation of the forward pass reads, after all equations behind it."""
        self.stored.update(v for v in eqn.outvars if v not in needed)
        place = self._places.get(eqn.outvars[0]) if eqn.outvars else None
        is_stored = self.stored.issuperset(eqn.outvars)
        for atom in variables(eqn.invars):
            maker = self._places.get(atom)
            within = maker is not None and place is not None and maker.is_in(place)
            if within and not is_stored:
                self._read_within.add(atom)
            if not (within and is_stored):
                needed.add(atom)

    def is_gradient(self, eqn: JaxprEqn) -> bool:
        """Whether an equation is a part of the backward pass."""
        return self._in_gradient or phase_of([eqn]) == "backward"

    def inside(self, eqn: JaxprEqn) -> list[Statements]:
        """The bodies of a loop or branch; none for other equations."""
        if eqn.primitive not in LOOPS:
            return []
        carried = counts_of(eqn)[1] if eqn.primitive is scan_p else len(eqn.outvars)
        unread = {n for n, v in enumerate(eqn.outvars) if n >= carried and v in self.stored}
        return [Statements(inner, self.is_gradient(eqn), unread) for inner in bodies(eqn)]

    def assigned(self) -> dict[Any, str]:
        """The names of values that statements of the user assign, loops included.

        An equation makes the value of its statement if no other equation of it reads the result.
        """
        found: dict[Any, str] = {}
        for eqn in self.jaxpr.eqns:
            for inner in self.inside(eqn):
                found.update(inner.assigned())
        several = {v for eqn in self.jaxpr.eqns if len(eqn.outvars) > 1 for v in eqn.outvars}
        ends = self._places.keys() - self._read_within - self.stored - several
        return {**found, **{var: self._places[var].statement[2] for var in ends}}


def variables(atoms: Iterable[Any]) -> Iterator[Any]:
    """The atoms that are not constants."""
    return (a for a in atoms if not isinstance(a, Literal))


def expression(eqn: JaxprEqn) -> str:
    """The source text of the expression that an equation comes from, shortened; "" if unknown."""
    span = span_of(eqn)
    if span is None:
        return ""
    path, first, start, last, end = span
    lines = linecache.getlines(path)[first - 1 : last]
    if not lines:
        return ""
    lines[-1] = lines[-1].encode()[:end].decode(errors="replace")  # columns count bytes
    lines[0] = lines[0].encode()[start:].decode(errors="replace")
    return _shortened(re.sub(r"\s+", " ", "".join(lines)).strip())


def argument_of_call(eqn: JaxprEqn) -> str:
    """The first argument of the call that an equation comes from, if that is a name."""
    first = _argument(eqn)
    is_name = isinstance(first, ast.Name | ast.Attribute | ast.Subscript)
    return ast.unparse(first) if first is not None and is_name else ""


def expression_of_call(eqn: JaxprEqn) -> str:
    """The text of the first argument of the call that an equation comes from, shortened."""
    first = _argument(eqn)
    return _shortened(ast.unparse(first)) if first is not None else ""


def _argument(eqn: JaxprEqn) -> ast.expr | None:
    span = span_of(eqn)
    if span is None:
        return None
    for node in _parsed("".join(linecache.getlines(span[0]))):
        if isinstance(node, ast.Call) and _span(node) == span[1:] and node.args:
            return node.args[0]
    return None


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def target(eqn: JaxprEqn) -> str:
    """The name that the statement of an equation assigns; "" if there is none."""
    place = _place(eqn)
    return place.statement[2] if place else ""


def _place(eqn: JaxprEqn) -> _Expression | None:
    """Where an equation comes from, if that is a part of an assignment."""
    span = span_of(eqn)
    if span is None:
        return None
    path, *ends = span
    start, end = (ends[0], ends[1]), (ends[2], ends[3])
    for extent, line, name in _targets("".join(linecache.getlines(path))).get(span[1], ()):
        if extent[:2] <= start and end <= extent[2:]:
            return _Expression((path, line, name), start, end)
    return None


@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> tuple[ast.AST, ...]:
    try:
        return tuple(ast.walk(ast.parse(text)))
    except SyntaxError:  # the file has changed since
        return ()


@functools.lru_cache(maxsize=64)
def _targets(text: str) -> dict[int, list[tuple[_Span, int, str]]]:
    """By line: the expressions that are assigned to one name, and the line and that name."""
    found: dict[int, list[tuple[_Span, int, str]]] = {}
    for node in _parsed(text):
        for value, name in _pairs(node):
            span = _span(value)
            for line in range(span[0], span[2] + 1):
                found.setdefault(line, []).append((span, span[0], name))
    return found


def _pairs(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """The expressions of a statement, each with the one name that it is assigned to."""
    if isinstance(node, ast.AugAssign | ast.AnnAssign | ast.NamedExpr):
        if node.value is not None and isinstance(node.target, ast.Name):
            expression = node if isinstance(node, ast.AugAssign) else node.value
            yield expression, node.target.id
    elif isinstance(node, ast.Assign) and len(node.targets) == 1:
        yield from _assignments(node.targets[0], node.value)


def _assignments(left: ast.expr, right: ast.expr) -> Iterator[tuple[ast.AST, str]]:
    if isinstance(left, ast.Name):
        yield right, left.id
    elif isinstance(left, ast.Tuple) and isinstance(right, ast.Tuple):
        for one, part in zip(left.elts, right.elts, strict=False):
            yield from _assignments(one, part)


def _span(node: Any) -> _Span:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset
