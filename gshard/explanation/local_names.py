"""What the user's code calls the values of the per-device program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jax.extend.core import JaxprEqn, Literal

from gshard.explanation.names import letters_of_name, result_letters, shape
from gshard.explanation.statements import Statements, expression
from gshard.explanation.subject import Subject
from gshard.graph.reason import NO_REASON
from gshard.graph.source import reason_of

_MOST = 3  # values of a combined collective that are named


class LocalNames:
    """Names of the values of one per-device program, those of loops included."""

    def __init__(self, subject: Subject):
        self._names: dict[Any, str] = {}
        self._makers: dict[Any, JaxprEqn] = {}
        program = Statements(subject.jaxpr)
        self._assigned = program.assigned()
        inputs = zip(subject.jaxpr.invars, subject.argument_names, strict=False)
        self._add(program, {var: name for var, name in inputs if name})

    def name(self, value: Any) -> str:
        """The name of a value, or the expression that makes it; "" if neither is known."""
        return self._names.get(value, "")

    def shape(self, value: Any) -> str:
        """Type and sizes on one device, with letters for the dims where the code has some."""
        return shape(value, self._letters(value))

    def _letters(self, value: Any) -> str:
        rank = len(getattr(value.aval, "shape", ()))
        found = letters_of_name(self.name(value), rank)
        if not found and value in self._assigned:
            found = result_letters(self._makers[value], rank)
        return found

    def _add(self, body: Statements, known: Mapping[Any, str]) -> None:
        self._names.update(known)
        for eqn in body.jaxpr.eqns:
            for inner in body.inside(eqn):
                passed = zip(reversed(inner.jaxpr.invars), reversed(eqn.invars), strict=False)
                self._add(inner, {v: n for v, atom in passed if (n := self._of(atom))})
            for var in eqn.outvars:
                self._makers[var] = eqn
                self._names[var] = self._assigned.get(var) or self._made(body, eqn, var)

    def _made(self, body: Statements, eqn: JaxprEqn, var: Any) -> str:
        """The name of a value that no statement assigns."""
        moved = [n for a in eqn.invars if (n := self._of(a))]
        if moved and reason_of(eqn) != NO_REASON:  # the same values, elsewhere
            return joined(moved)
        text = expression(eqn)
        if text and body.is_gradient(eqn):
            return f"gradient through {text}"
        return f"for the gradient of {text}" if text and var in body.stored else text

    def _of(self, atom: Any) -> str:
        return "" if isinstance(atom, Literal) else self._names.get(atom, "")


def joined(names: Iterable[str]) -> str:
    """Several names as one text, each once."""
    different = list(dict.fromkeys(names))
    more = len(different) - _MOST
    return ", ".join(different[:_MOST]) + (f" and {more} more" if more > 0 else "")
