"""Interpret a program equation by equation.

The interpretation is a function of the equation and its operands' values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

Interpret = Callable[[JaxprEqn, list[Any]], Sequence[Any]]


def bind(eqn: JaxprEqn, values: Sequence[Any], **changed: Any) -> Sequence[Any]:
    """The results of an equation as JAX computes them, with some of its parameters `changed`."""
    params = eqn.primitive.get_bind_params({**eqn.params, **changed})
    results = eqn.primitive.bind(*values, **params)
    return results if eqn.primitive.multiple_results else [results]


def evaluate(program: ClosedJaxpr, args: Sequence[Any], interpret: Interpret = bind) -> list[Any]:
    """The results of a program in which `interpret` computes those of every equation."""
    jaxpr = program.jaxpr
    env: dict[Any, Any] = dict(
        zip((*jaxpr.constvars, *jaxpr.invars), (*program.consts, *args), strict=True)
    )

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        results = interpret(eqn, [read(a) for a in eqn.invars])
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(a) for a in jaxpr.outvars]
