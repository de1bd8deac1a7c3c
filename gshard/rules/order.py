"""Operators along an order: cumulative ones, sorting, the largest k."""

from __future__ import annotations

from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as p

from gshard.rules.registry import Factors, Rule, register


def along_dim(eqn: JaxprEqn) -> Factors:
    """Every dim but the one the operator runs along is free."""
    axis = eqn.params.get("axis", eqn.params.get("dimension"))
    names = [None if d == axis else f"d{d}" for d in range(len(eqn.invars[0].aval.shape))]
    return Factors.of(eqn, [names] * len(eqn.invars), [names] * len(eqn.outvars))


register(Rule(along_dim), p.cumsum_p, p.cumprod_p, p.cummax_p, p.cummin_p, p.cumlogsumexp_p, p.sort_p)
