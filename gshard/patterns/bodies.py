"""Loops and branches whose programs are written anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxprs_in_params


def written_anew(
    eqns: Sequence[JaxprEqn],
    shardings: Mapping[Any, Any],
    write: Callable[[ClosedJaxpr], ClosedJaxpr],
) -> list[JaxprEqn]:
    """The equations with `write` of each program in them."""
    plain = getattr(shardings, "kinds", ())  # equations of a known kind hold no programs
    return [eqn if id(eqn) in plain else with_bodies(eqn, write) for eqn in eqns]


def with_bodies(eqn: JaxprEqn, write: Callable[[ClosedJaxpr], ClosedJaxpr]) -> JaxprEqn:
    """The equation with `write` of each program in it; the same one if none changes."""

    def changed(param: Any) -> Any:
        if isinstance(param, ClosedJaxpr):
            return write(param)
        if isinstance(param, tuple) and any(isinstance(x, ClosedJaxpr) for x in param):
            return tuple(map(changed, param))
        return param

    if not list(jaxprs_in_params(eqn.params)):
        return eqn
    params = {k: changed(v) for k, v in eqn.params.items()}
    same = all(params[k] is v or params[k] == v for k, v in eqn.params.items())
    return eqn if same else eqn.replace(params=params)
