"""What the user's code calls a value and its dims.

Equations know where in the source they come from, columns included: the text there has the names.
Dims are called by the letters of an einsum, or by those at the end of a name, as in `x_GSM`.
"""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import re
from collections.abc import Iterable, Iterator
from typing import Any

from jax.extend.core import JaxprEqn, Literal

from gshard.annotate import annotate_p
from gshard.explanation.subject import Subject
from gshard.graph.source import scopes_of, span_of

_EINSUM = re.compile(r"[A-Za-z]*(,[A-Za-z]*)*->[A-Za-z]*")
_Span = tuple[int, int, int, int]


class Names:
    """The names of one program's values."""

    def __init__(self, subject: Subject):
        self._subject = subject
        self._arguments = {
            var: name
            for var, name in zip(subject.flat.jaxpr.invars, subject.names, strict=False)
            if not name.startswith("arrays[")  # of gshard's own wrapper
        }
        self._makers = {v: e for e in subject.equations for v in e.outvars}

    @functools.cached_property
    def _assigned(self) -> dict[Any, str]:
        """The value of a statement is what its last equation makes."""
        found: dict[tuple[str, int, str], Any] = {}
        for eqn in self._subject.equations:
            span = span_of(eqn)
            if span and len(eqn.outvars) == 1 and (target := _target(span[0], span[1:])):
                found[span[0], *target] = eqn.outvars[0]
        return {var: name for (_, _, name), var in found.items()}

    @functools.cached_property
    def _readers(self) -> dict[Any, list[JaxprEqn]]:
        found: dict[Any, list[JaxprEqn]] = {}
        for eqn in self._subject.equations:
            for atom in eqn.invars:
                if not isinstance(atom, Literal):
                    found.setdefault(atom, []).append(eqn)
        return found

    def name(self, var: Any) -> str:
        """What the code calls a value; "" for one in the midst of an expression."""
        if self._arguments.get(var):
            return self._arguments[var]
        eqn = self._makers.get(var)
        if eqn is None:
            return ""
        annotated = annotated_name(eqn) if eqn.primitive is annotate_p else ""
        return annotated or self._assigned.get(var, "")

    def value(self, var: Any) -> str:
        """The name of a value, else its shape."""
        return self.name(var) or shape(var)

    def dim(self, var: Any, dim: int) -> str:
        """The letter of a dim, else its number."""
        letters = self.dims(var)
        return letters[dim] if letters else f"dim {dim}"

    def dims(self, var: Any) -> str:
        """A letter for each dim of a value; "" if the code gives none."""
        rank = len(var.aval.shape)
        end = re.search(r"_([A-Za-z]+)$", self.name(var))
        if end and len(end[1]) == rank and (end[1].isupper() or rank == 1):
            return end[1]
        maker = self._makers.get(var)
        behind = maker.invars[0] if maker is not None and maker.primitive is annotate_p else None
        if behind is not None and behind in self._makers:  # an annotation changes no dims
            return self._result(self._makers[behind], rank) or self._operand(var, rank)
        result = self._result(maker, rank) if maker is not None and var in self._assigned else ""
        return result or self._operand(var, rank)

    def _result(self, maker: JaxprEqn, rank: int) -> str:
        """The letters of the result of an einsum that ends in `maker`."""
        found = [spec.rpartition("->")[2] for spec in einsums(maker)]
        return next((letters for letters in found if len(letters) == rank), "")

    def _operand(self, var: Any, rank: int) -> str:
        """The letters that einsums have for an operand, if only one choice fits all of them."""
        choices = [
            set(_fitting(spec.partition("->")[0].split(","), eqn, var))
            for eqn in self._readers.get(var, ())
            for spec in einsums(eqn)
        ]
        found = set.intersection(*filter(None, choices)) if any(choices) else set()
        return found.pop() if len(found) == 1 else ""


def _fitting(operands: list[str], eqn: JaxprEqn, var: Any) -> Iterator[str]:
    """The operands of an einsum that `var` can be: each letter has one size in all of them."""
    for order in itertools.permutations(operands, len(eqn.invars)):
        sizes: dict[str, set[Any]] = {}
        for letters, atom in zip(order, eqn.invars, strict=True):
            shape = atom.aval.shape
            for letter, size in itertools.zip_longest(letters, shape, fillvalue=""):
                sizes.setdefault(str(letter), set()).add(size)
        if all(len(known) == 1 for known in sizes.values()) and "" not in sizes:
            yield order[list(eqn.invars).index(var)]


def einsums(eqn: JaxprEqn) -> list[str]:
    """The specs of the einsums that an equation is a part of, as in "GSM,ME->GSE"."""
    return einsums_of(scopes_of(eqn))


def einsums_of(scopes: Iterable[str]) -> list[str]:
    """Those of name scopes that are the spec of an einsum."""
    return [name for name in scopes if _EINSUM.fullmatch(name)]


def annotated_name(eqn: JaxprEqn) -> str:
    """What the code calls the tensor that it annotates: the call's argument, or its result."""
    span = span_of(eqn)
    if span is None:
        return ""
    for node in _nodes(span[0]):
        if isinstance(node, ast.Call) and _span(node) == span[1:] and node.args:
            first = node.args[0]
            if isinstance(first, ast.Name | ast.Attribute | ast.Subscript):
                return ast.unparse(first)
    target = _target(span[0], span[1:])
    return target[1] if target else ""


def shape(var: Any) -> str:
    """Type and sizes, as in f32[8,64]."""
    return var.aval.str_short(short_dtypes=True)


@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> tuple[ast.AST, ...]:
    try:
        return tuple(ast.walk(ast.parse(text)))
    except SyntaxError:  # the file is another one by now
        return ()


def _nodes(path: str) -> tuple[ast.AST, ...]:
    return _parsed("".join(linecache.getlines(path)))


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


def _pairs(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return
    target, value = node.targets[0], node.value
    if isinstance(target, ast.Name):
        yield value, target.id
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, expression in zip(target.elts, value.elts, strict=False):
            if isinstance(one, ast.Name):
                yield expression, one.id


def _target(path: str, span: _Span) -> tuple[int, str] | None:
    """The line and the name of the assignment whose value has `span` in it."""
    for whole, line, name in _targets("".join(linecache.getlines(path))).get(span[0], ()):
        if whole[:2] <= span[:2] and span[2:] <= whole[2:]:
            return line, name
    return None


def _span(node: Any) -> _Span:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset
