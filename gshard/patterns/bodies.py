"""Loops and branches whose programs are written anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxprs_in_params


def with_bodies(eqn: JaxprEqn, write: Callable[[ClosedJaxpr], ClosedJaxpr]) -> JaxprEqn:
    """The equation with `write` of each program in it; the same one if none changes."""

    def changed(param: Any) -> Any:
        if isinstance(param, ClosedJaxpr):
            return write(param)
        if isinstance(param, tuple) and any(isinstance(x, ClosedJaxpr) for x in param):
            return tuple(map(changed, param))
        return param

    if not any(isinstance(v, (ClosedJaxpr, tuple)) for v in eqn.params.values()):
        return eqn  # told quickly, as of most
    if not list(jaxprs_in_params(eqn.params)):
        return eqn
    params = {k: changed(v) for k, v in eqn.params.items()}
    same = all(params[k] is v or params[k] == v for k, v in eqn.params.items())
    return eqn if same else eqn.replace(params=params)
