"""Expansion of equations into smaller ones that gshard has rules for.

A primitive without a rule is often implemented by a Python function of arrays (sparse matrices, the
primitives of Equinox), which can be traced. Other primitives are simplified here as their lowering
would do: a loop whose condition was batched by `vmap` runs while any member does, and the others
keep their values; a `psum` over an axis of `vmap` is a sum over a dim.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun
from jax.extend.core import primitives as p

from gshard._jax import custom_partitioning_p
from gshard.graph.regions import walk
from gshard.rules.base.rule import REGIONS, RULES
from gshard.rules.unknown import implementation, traced


def expand(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """A program equivalent to `eqn`, if it should be expanded; else None."""
    if eqn.primitive is p.while_p and eqn.params["cond_jaxpr"].out_avals[0].shape:
        return traced(eqn, _batched_while)
    if eqn.primitive in _REDUCERS and all(isinstance(a, int) for a in eqn.params["axes"]):
        return traced(eqn, _reduction_over_dims)
    described = eqn.primitive is not custom_partitioning_p or eqn.params["sharding_rule"]
    known = eqn.primitive in RULES or eqn.primitive in REGIONS
    if (known and described) or eqn.effects:
        return None
    closed = implementation(eqn)
    if not isinstance(closed, ClosedJaxpr):
        return None
    wanted = [(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
    same = [(a.shape, a.dtype) for a in closed.out_avals] == wanted
    endless = any(_alike(inner, eqn) for inner in walk(closed.jaxpr))
    return closed if same and not endless else None


def _alike(one: JaxprEqn, other: JaxprEqn) -> bool:
    """Whether equations are equal; a solver may call another solver inside."""
    if one.primitive is not other.primitive:
        return False
    shapes = [[(a.aval.shape, a.aval.dtype) for a in eqn.invars] for eqn in (one, other)]
    return shapes[0] == shapes[1] and str(one.params) == str(other.params)


_REDUCERS = {p.psum_p: lax.reduce_sum, p.pmax_p: lax.reduce_max, p.pmin_p: lax.reduce_min}


def _reduction_over_dims(eqn: JaxprEqn, *operands: Any) -> list[Any]:
    """A collective over the axis of a `vmap`, which has become a dim."""
    return [_REDUCERS[eqn.primitive](x, eqn.params["axes"]) for x in operands]


def _batched_while(eqn: JaxprEqn, *operands: Any) -> list[Any]:
    """A loop batched by `vmap`: it runs while any member does; others keep their values."""
    cond, body = (jaxpr_as_fun(eqn.params[k]) for k in ("cond_jaxpr", "body_jaxpr"))
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond_consts, rest = operands[:n_cond], operands[n_cond:]
    body_consts, carry = rest[:n_body], list(rest[n_body:])

    def going(carried: list[Any]) -> Any:
        (again,) = cond(*cond_consts, *carried)
        return again

    def step(carried: list[Any]) -> list[Any]:
        again = going(carried)
        after = body(*body_consts, *carried)
        return [_where(again, new, old) for new, old in zip(after, carried, strict=True)]

    return lax.while_loop(lambda carried: jnp.any(going(carried)), step, carry)


def _where(mask: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """`new` where `mask`, whose dims lead, is true; else `old`."""
    mask = lax.broadcast_in_dim(mask, new.shape, range(mask.ndim))
    return lax.select(mask, new, old)
