"""A program as text: one line per equation, the bodies of loops indented below them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from gshard.graph.regions import bodies

Note = Callable[[JaxprEqn], str]  # the note for an equation, or ""


def program_text(
    jaxpr: Jaxpr,
    title: str = "program",
    note: Note = lambda eqn: "",
    names: dict[Any, str] | None = None,
) -> str:
    """The program as readable text; a `note` follows its equation.

    `names` has the names of variables that were shown before.
    """
    names = {} if names is None else names
    lines = [f"{title} ({_inputs(jaxpr, names)})"]
    lines += _lines(jaxpr, names, note, "  ")
    return "\n".join(lines)


def _inputs(jaxpr: Jaxpr, names: dict[Any, str]) -> str:
    return ", ".join(_typed(v, names) for v in (*jaxpr.constvars, *jaxpr.invars))


def _lines(jaxpr: Jaxpr, names: dict[Any, str], note: Note, indent: str) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        # A node of a plan also reads the device's number, which is not shown.
        read = eqn.invars[:1] if "node" in eqn.params else eqn.invars
        operands = "".join(f" {_name(a, names)}" for a in read)
        results = ", ".join(_typed(v, names) for v in eqn.outvars)
        remark = f"  # {found}" if (found := note(eqn)) else ""
        yield f"{indent}{results} = {eqn.primitive.name}{_params(eqn)}{operands}{remark}"
        for body in bodies(eqn):
            yield f"{indent}  body ({_inputs(body, names)})"
            yield from _lines(body, names, note, indent + "    ")
    yield f"{indent}return " + ", ".join(_name(a, names) for a in jaxpr.outvars)


def _params(eqn: JaxprEqn) -> str:
    """The informative parameters, shortened; long device groups are omitted."""
    shown = []
    for key, value in eqn.params.items():
        # Not `value in (None, (), False)`: some types cannot be compared with others.
        if value is None or (isinstance(value, (int, float, tuple)) and not value):
            continue
        if key in _LEFT_OUT or isinstance(value, (Jaxpr, ClosedJaxpr)):
            continue
        if isinstance(value, tuple) and any(isinstance(v, (Jaxpr, ClosedJaxpr)) for v in value):
            continue
        text = str(value) if len(str(value)) <= _LENGTH else str(value)[: _LENGTH - 3] + "..."
        shown.append(text if key == "node" else f"{key}={text}")
    return f"[{' '.join(shown)}]" if shown else ""


_LENGTH = 100  # of a parameter
_LEFT_OUT = {
    "axis_name", "axis_size", "tiled", "sharding", "out_sharding", "weak_type", "ft_in", "ft_out",
}  # fmt: skip


def _name(atom: Any, names: dict[Any, str]) -> str:
    if isinstance(atom, Literal):
        return str(atom.val) if np.ndim(atom.val) == 0 else str(np.asarray(atom.val).tolist())
    if atom not in names:
        number, letters = len(names), ""
        while True:
            letters = chr(ord("a") + number % 26) + letters
            number = number // 26 - 1
            if number < 0:
                break
        names[atom] = letters
    return names[atom]


def _typed(var: Any, names: dict[Any, str]) -> str:
    return f"{_name(var, names)}:{var.aval.str_short(short_dtypes=True)}"
