"""What the user's code calls a value and its dims.

Dims are called by the letters of an einsum, by those at the end of a name, as in `x_GSM`, or by the
mesh axes that a `PartitionSpec` splits them over.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Literal

from gshard.explanation.statements import (
    Statements,
    argument_of_call,
    expression,
    expression_of_call,
    target,
)
from gshard.explanation.subject import Subject
from gshard.graph import Graph
from gshard.graph.reason import NO_REASON
from gshard.graph.source import reason_of, scopes_of, span_of
from gshard.tensors.annotate import annotate_p

_EINSUM = re.compile(r"[A-Za-z]*(,[A-Za-z]*)*->[A-Za-z]*")


class Names:
    """The names of one program's values."""

    def __init__(self, subject: Subject):
        self._subject = subject
        self._arguments = dict(zip(subject.flat.jaxpr.invars, subject.argument_names, strict=False))
        self._graph = Graph(subject.equations)

    @functools.cached_property
    def _assigned(self) -> dict[Any, str]:
        return Statements(self._subject.flat.jaxpr).assigned()

    def name(self, var: Any) -> str:
        """What the code calls a value; "" for one in the midst of an expression."""
        if self._arguments.get(var):
            return self._arguments[var]
        eqn = self._graph.maker(var)
        if eqn is None:
            return ""
        if eqn.primitive is annotate_p:
            own, argument = annotated_name(eqn), self._argument(eqn)
            of_tree = span_of(eqn) in self._mapped or argument.startswith((f"{own}.", f"{own}["))
            return ("" if of_tree else own) or argument or self._assigned.get(var, "") or own
        return self._assigned.get(var, "")

    def _argument(self, annotation: JaxprEqn) -> str:
        """The name of the argument that is annotated, as by `in_shardings`, which has no line."""
        return self._arguments.get(annotation.invars[0], "")

    @functools.cached_property
    def _mapped(self) -> set[Any]:
        """The calls that annotate several arguments, under one name: in a `jax.tree.map`."""
        found: dict[Any, set[str]] = {}
        for eqn in self._subject.annotations:
            if name := self._argument(eqn):
                found.setdefault(span_of(eqn), set()).add(name)
        return {span for span, names in found.items() if len(names) > 1}

    def value(self, var: Any) -> str:
        """The name of a value, or the expression that is annotated, else its shape."""
        eqn = self._graph.maker(var)
        text = expression_of_call(eqn) if eqn is not None and eqn.primitive is annotate_p else ""
        return self.name(var) or text or shape(var)

    def dim(self, var: Any, dim: int) -> str:
        """The name of a dim, else its number."""
        return self.dims(var)[dim] or f"dim {dim}"

    def dims(self, var: Any) -> tuple[str, ...]:
        """A name for each dim of a value; "" where the code gives none."""
        rank = len(var.aval.shape)
        maker = self._graph.maker(var)
        letters = letters_of_name(self.name(var), rank) or self._letters(var, rank)
        twin = var  # differentiation repeats annotations
        if maker is not None:
            twin = self._first_of_call.get(span_of(maker), maker.outvars[0])
        if not letters and twin is not var and twin.aval.shape == var.aval.shape:
            return self.dims(twin)
        if not letters and maker is not None and maker.primitive is annotate_p:
            return maker.params["annotation"].axes or ("",) * rank
        return tuple(letters) or ("",) * rank

    @functools.cached_property
    def _first_of_call(self) -> dict[Any, Any]:
        return {span_of(e): e.outvars[0] for e in reversed(self._subject.annotations)}

    def _letters(self, var: Any, rank: int) -> str:
        """The letters of an einsum that makes or reads a value."""
        maker = self._graph.maker(var)
        behind = maker.invars[0] if maker is not None and maker.primitive is annotate_p else None
        if behind is not None and (before := self._graph.maker(behind)):
            return result_letters(before, rank) or self._operand(var, rank)  # of the same dims
        made = maker is not None and var in self._assigned
        return (result_letters(maker, rank) if made else "") or self._operand(var, rank)

    def _operand(self, var: Any, rank: int) -> str:
        """The letters that einsums have for an operand, if only one choice fits all of them."""
        choices = [
            set(_fitting(spec.partition("->")[0].split(","), eqn, var))
            for eqn in self._graph.users(var)
            for spec in einsums(eqn)
        ]
        found = set.intersection(*filter(None, choices)) if any(choices) else set()
        return found.pop() if len(found) == 1 else ""


def letters_of_name(name: str, rank: int) -> str:
    """The letters at the end of a name, as in `x_GSM`, if there is one for each dim."""
    end = re.search(r"_([A-Za-z]+)$", name)
    fits = end and len(end[1]) == rank and (end[1].isupper() or rank == 1)
    return end[1] if end and fits else ""


def result_letters(maker: JaxprEqn, rank: int) -> str:
    """The letters of the result of an einsum that ends in `maker`."""
    found = [spec.rpartition("->")[2] for spec in einsums(maker)]
    return next((letters for letters in found if len(letters) == rank), "")


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
    return einsums_of(scopes_of([eqn]))


def einsums_of(scopes: Iterable[str]) -> list[str]:
    """The name scopes that are the spec of an einsum."""
    return [name for name in scopes if _EINSUM.fullmatch(name)]


def annotated_name(eqn: JaxprEqn) -> str:
    """What the code calls the tensor that it annotates: the call's argument, or its result."""
    return argument_of_call(eqn) or target(eqn)


def annotated_call(eqn: JaxprEqn) -> str:
    """An annotation as the code spells it, with the name of its tensor."""
    return spelled(eqn).replace("tensor", annotated_name(eqn) or "tensor")


def spelled(eqn: JaxprEqn) -> str:
    """An annotation as a call: that of `fsdp` as the `split` of one dim that it asks for."""
    annotation = eqn.params["annotation"]
    dims = [(dim, tiles) for dim, tiles in enumerate(annotation.tiles) if tiles > 1]
    if len(dims) == 1 and annotation.assignment == tuple(range(dims[0][1])):
        return f"split(tensor, {dims[0][0]}, {dims[0][1]})"
    return str(annotation)


def shape(value: Any, dims: Sequence[str] = ()) -> str:
    """Type and sizes, with the names of dims where all are known: f32[8,64] or f32[G=8,M=64]."""
    text = value.aval.str_short(short_dtypes=True)
    if not dims or not all(dims):
        return text
    sizes = (f"{name}={size}" for name, size in zip(dims, value.aval.shape, strict=True))
    return f"{text.partition('[')[0]}[{','.join(sizes)}]"


# ---------------------------------------------------------------- of the per-device program


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
