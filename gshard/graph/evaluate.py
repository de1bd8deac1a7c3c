"""Between programs and functions: a program interpreted, and a function's equations.

The interpretation of an equation is a function of the equation and its operands' values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from gshard._jax import Var
from gshard.graph.graph import renamed
from gshard.graph.regions import in_tuple

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


def rebuilt(
    param: Any, interpret: Interpret, struct: Callable[[Any], Any] = lambda var: var.aval
) -> Any:
    """A parameter of an equation, with its programs interpreted on arguments of other types."""
    if not isinstance(param, ClosedJaxpr):
        return in_tuple(param, lambda part: rebuilt(part, interpret, struct))
    structs = [struct(v) for v in param.jaxpr.invars]
    return jax.make_jaxpr(lambda *args: evaluate(param, args, interpret))(*structs)


def equations_of(
    fn: Callable[..., Any],
    operands: Sequence[Any],
    results: Sequence[Any] = (),
    like: JaxprEqn | None = None,
    axes: Sequence[tuple[str, int]] = (),
) -> tuple[list[JaxprEqn], list[Any]]:
    """The equations of a function of these variables, and its results.

    The first results are the variables `results`; all others are new. Source line and name scope
    are those of the equation `like`, if given. `axes` are those of a mesh, with their sizes.
    """
    types = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in operands]
    traced = jax.make_jaxpr(fn, axis_env=list(axes))(*types)
    jaxpr = traced.jaxpr
    names: dict[Any, Any] = dict(zip(jaxpr.invars, operands, strict=True))
    for var, const in zip(jaxpr.constvars, traced.consts, strict=True):
        names[var] = Literal(np.asarray(const), var.aval)
    for eqn in jaxpr.eqns:
        names |= {v: Var(v.aval) for v in eqn.outvars}
    names |= zip(jaxpr.outvars, results, strict=False)
    info = {"ctx": like.ctx, "source_info": like.source_info} if like else {}
    equations = [renamed(eqn, names, **info) for eqn in jaxpr.eqns]
    return equations, [v if isinstance(v, Literal) else names[v] for v in jaxpr.outvars]
