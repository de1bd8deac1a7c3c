"""Between programs and functions: a program interpreted, and a function's equations.

The interpretation of an equation is a function of the equation and its operands' values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard._jax import Var
from gshard.graph.graph import renamed, replacing
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
    given = (*jaxpr.constvars, *jaxpr.invars)
    env = dict[Any, Any](zip(given, (*program.consts, *args), strict=True))

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

    The first results are the variables `results`, copies where they are equal; all others are new.
    Line and scope are those of the equation `like`, if given. `axes` are a mesh's, with sizes.
    """
    types = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in operands]
    traced = jax.make_jaxpr(fn, axis_env=list(axes))(*types)
    jaxpr, named = traced.jaxpr, list(zip(traced.jaxpr.outvars, results, strict=False))
    names: dict[Any, Any] = {v: Var(v.aval) for eqn in jaxpr.eqns for v in eqn.outvars}
    names |= [(v, result) for v, result in reversed(named) if v in names]
    consts = (Literal(np.asarray(c), jax.typeof(c)) for c in traced.consts)
    names |= zip((*jaxpr.invars, *jaxpr.constvars), (*operands, *consts), strict=True)
    info = {"ctx": like.ctx, "source_info": like.source_info} if like else {}
    equations = [renamed(eqn, names, **info) for eqn in jaxpr.eqns]
    again = [(names[v], result) for v, result in named if names[v] is not result]
    equations += [replacing(like or equations[0], p.copy_p, [a], result) for a, result in again]
    return equations, [v if isinstance(v, Literal) else names[v] for v in jaxpr.outvars]
