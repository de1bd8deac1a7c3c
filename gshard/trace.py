"""Function -> one flat program over logical shapes.

Calls (`jit`, `custom_jvp`, `custom_vjp`, `remat`, linear solvers) are inlined: differentiation has
happened by now, so their bodies are all that is left of them; so are equations that stand for
others (see `expand`). Loops and branches stay, as copies of
their own, so that every variable in the program belongs to one place in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, new_jaxpr_eqn
from jax.extend.core import primitives as p

from gshard._jax import (
    COMPOSITE_BODY,
    Var,
    dce_jaxpr,
    discharge_refs,
    optimization_barrier_p,
    private_primitives,
    remat_p,
)
from gshard.annotate import tracing_for
from gshard.expand import expand
from gshard.rewrite import fold

CALLS = {
    p.jit_p: "jaxpr",
    p.closed_call_p: "call_jaxpr",
    p.call_p: "call_jaxpr",
    p.custom_jvp_call_p: "call_jaxpr",
    p.custom_vjp_call_p: "call_jaxpr",
    remat_p: "jaxpr",
    p.linear_solve_p: "jaxprs",
    **dict.fromkeys(private_primitives("custom_batching", "custom_vmap_p"), "call"),
    **dict.fromkeys(private_primitives("lax.lax", "composite_p"), COMPOSITE_BODY),
}


# Reads and writes of references are those of values by the time the program is flat.
REFS = (p.get_p, p.swap_p, *private_primitives("state.primitives", "addupdate_p"))
LOOPS = (p.scan_p, p.while_p, p.cond_p)  # their bodies are partitioned like any program


def trace(
    flat_fn: Callable, avals: Sequence[Any], num_devices: int, folded: bool = True
) -> ClosedJaxpr:
    """The flat program of `flat_fn`, a function from a list of arrays to a list of arrays.

    `folded` joins equations that are better partitioned as one (see `fold`).
    """
    with tracing_for(num_devices):
        closed = jax.make_jaxpr(flat_fn)(*avals)
    closed = discharge_refs(closed)
    live, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    return _Builder(folded).body(ClosedJaxpr(live, closed.consts))


class _Builder:
    """Copies equations with fresh variables, collecting the constants of inlined calls."""

    def __init__(self, folded: bool):
        self.folded = folded
        self.eqns: list[JaxprEqn] = []
        self.consts: dict[Var, Any] = {}

    def body(self, closed: ClosedJaxpr) -> ClosedJaxpr:
        invars = [Var(v.aval) for v in closed.jaxpr.invars]
        outvars = self.inline(closed.jaxpr, closed.consts, invars)
        jaxpr = Jaxpr(
            list(self.consts),
            invars,
            outvars,
            fold(self.eqns, outvars, self.consts) if self.folded else self.eqns,
            closed.jaxpr.effects,
            debug_info=closed.jaxpr.debug_info.with_unknown_names(),
        )
        return ClosedJaxpr(jaxpr, list(self.consts.values()))

    def inline(self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Append the equations of `jaxpr`, called with `args`; its results."""
        env: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            env[var] = Var(var.aval)
            self.consts[env[var]] = value

        def read(atom):
            return atom if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            invars = [read(a) for a in eqn.invars]
            if eqn.primitive in CALLS:
                env.update(zip(eqn.outvars, self.call(eqn, invars), strict=True))
                continue
            if (expanded := expand(eqn)) is not None:
                results = self.inline(expanded.jaxpr, expanded.consts, invars)
                env.update(zip(eqn.outvars, results, strict=True))
                continue
            outvars = [Var(v.aval) for v in eqn.outvars]
            env.update(zip(eqn.outvars, outvars, strict=True))
            params = eqn.params
            if eqn.primitive in LOOPS:
                params = {k: self.copy_bodies(v) for k, v in params.items()}
            self.eqns.append(eqn.replace(invars=invars, outvars=outvars, params=params))
        return [read(a) for a in jaxpr.outvars]

    def call(self, eqn: JaxprEqn, args: list[Any]) -> list[Any]:
        inner = eqn.params[CALLS[eqn.primitive]]
        if eqn.primitive is remat_p and eqn.params["differentiated"]:
            args = self.barrier(eqn, args)
        if eqn.primitive is p.linear_solve_p:  # the solver is what is left to run, on its constants
            lengths = eqn.params["const_lengths"]
            start = lengths.matvec + lengths.vecmat
            right_side = args[start + lengths.solve + lengths.transpose_solve :]
            inner, args = inner.solve, args[start : start + lengths.solve] + right_side
        if isinstance(inner, ClosedJaxpr):
            return self.inline(inner.jaxpr, inner.consts, args)
        return self.inline(inner, (), args)

    def barrier(self, eqn: JaxprEqn, args: list[Any]) -> list[Any]:
        """What XLA must not see through, or it would undo the recomputation."""
        prevent = eqn.params["prevent_cse"]
        marks = [prevent] * len(args) if isinstance(prevent, bool) else prevent
        kept = [a for a, m in zip(args, marks, strict=True) if m and not isinstance(a, Literal)]
        if not kept:
            return args
        fresh = {id(a): Var(a.aval) for a in kept}
        self.eqns.append(
            new_jaxpr_eqn(
                kept,
                [fresh[id(a)] for a in kept],
                optimization_barrier_p,
                {},
                set(),
                eqn.source_info,
                eqn.ctx,
            )
        )
        return [fresh.get(id(a), a) if m else a for a, m in zip(args, marks, strict=True)]

    def copy_bodies(self, param: Any) -> Any:
        """A parameter of an equation; programs in it are copied."""
        if isinstance(param, ClosedJaxpr):
            return _Builder(self.folded).body(param)
        if isinstance(param, Jaxpr):
            return _Builder(self.folded).body(ClosedJaxpr(param, ())).jaxpr
        if isinstance(param, tuple) and any(isinstance(x, (ClosedJaxpr, Jaxpr)) for x in param):
            return tuple(map(self.copy_bodies, param))
        return param
