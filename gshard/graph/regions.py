"""Programs inside equations: calls, whose bodies are inlined, and loops and branches, which stay.

All passes enter them through this module; a region's program is a parameter of its equation, by
itself or in a tuple.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, jaxprs_in_params
from jax.extend.core import primitives as p

from gshard._jax import COMPOSITE_BODY, private_primitives, remat_p, scan_counts

# Calls, and the parameter that holds the body of each.
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
LOOPS = (p.scan_p, p.while_p, p.cond_p)  # their bodies are partitioned like any program
# Operators of packages above that have bodies, and the program that each equation stands for.
MEANINGS: dict[Primitive, Callable[[JaxprEqn], ClosedJaxpr]] = {}

P = ParamSpec("P")
Names = dict[Any, Any]  # variables, and equal ones that a pass put in their places
Link = tuple[Any, Any, int]  # two variables with the same dims; the first has `int` more, leading


def bodies(eqn: JaxprEqn) -> list[Jaxpr]:
    """The programs inside an equation of any kind."""
    return [getattr(j, "jaxpr", j) for j in jaxprs_in_params(eqn.params)]


def as_closed(body: Jaxpr | ClosedJaxpr) -> ClosedJaxpr:
    """A program inside an equation, with its constants."""
    return body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, ())


def called(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The program that a call runs on all its operands; None for any other equation.

    A linear solve runs one of its programs, on some of the operands: it is no call of that kind.
    """
    if eqn.primitive in MEANINGS:
        return MEANINGS[eqn.primitive](eqn)
    if eqn.primitive not in CALLS or eqn.primitive is p.linear_solve_p:
        return None
    return as_closed(eqn.params[CALLS[eqn.primitive]])


@dataclass(eq=False, frozen=True)
class Stored:
    """A value of an inlined call, or one that a compiler adds."""

    aval: Any


Inlined = tuple[JaxprEqn, list[Any], tuple[Any, ...]]  # an equation, its operands and results


def with_calls_inlined(
    jaxpr: Jaxpr, operands: Sequence[Any] | None = None
) -> tuple[list[Inlined], list[Any]]:
    """The equations of a program and of those that it calls, and the program's results.

    A program may be called more than once: where `operands` are given, its values are new ones.
    """
    names: dict[Any, Any] = dict(zip(jaxpr.invars, operands or (), strict=False))
    found: list[Inlined] = []

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else names.get(atom, atom)

    for eqn in jaxpr.eqns:
        reads = [read(a) for a in eqn.invars]
        if (body := called(eqn)) is not None:
            inner, results = with_calls_inlined(body.jaxpr, reads)
            found += inner
        else:
            results = eqn.outvars if operands is None else [Stored(v.aval) for v in eqn.outvars]
            found.append((eqn, reads, tuple(results)))
        names.update(zip(eqn.outvars, results, strict=True))
    return found, [read(a) for a in jaxpr.outvars]


def walk(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """All equations of a program, each before those of the programs inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for body in bodies(eqn):
            yield from walk(body)


def map_bodies(eqn: JaxprEqn, change: Callable[[ClosedJaxpr], ClosedJaxpr]) -> JaxprEqn:
    """The equation with every program inside it changed; the same one if none does."""
    if not bodies(eqn):
        return eqn
    params = {k: _changed(v, change) for k, v in eqn.params.items()}
    same = all(params[k] is v or params[k] == v for k, v in eqn.params.items())
    return eqn if same else eqn.replace(params=params)


def _changed(param: Any, change: Callable[[ClosedJaxpr], ClosedJaxpr]) -> Any:
    if isinstance(param, ClosedJaxpr):
        return change(param)
    if isinstance(param, Jaxpr):
        return change(ClosedJaxpr(param, ())).jaxpr
    return in_tuple(param, lambda part: _changed(part, change))


def in_tuple(param: Any, change: Callable[[Any], Any]) -> Any:
    """A parameter of which the parts are changed, if it is a tuple; one with names keeps them."""
    if not isinstance(param, tuple):
        return param
    parts = [change(part) for part in param]
    if all(new is old for new, old in zip(parts, param, strict=True)):
        return param
    return type(param)(*parts) if hasattr(param, "_fields") else type(param)(parts)


def at_every_level(
    change: Callable[Concatenate[Jaxpr, P], Jaxpr],
) -> Callable[Concatenate[Jaxpr, P], Jaxpr]:
    """A pass over a program that changes the bodies of loops and branches first, then itself."""

    @functools.wraps(change)
    def changed(jaxpr: Jaxpr, /, *args: P.args, **kwargs: P.kwargs) -> Jaxpr:
        def body(closed: ClosedJaxpr) -> ClosedJaxpr:
            inner = changed(closed.jaxpr, *args, **kwargs)
            return closed if inner is closed.jaxpr else closed.replace(jaxpr=inner)

        eqns = [map_bodies(eqn, body) if eqn.primitive in LOOPS else eqn for eqn in jaxpr.eqns]
        same = eqns == jaxpr.eqns  # equations are equal to themselves alone
        return change(jaxpr if same else jaxpr.replace(eqns=eqns), *args, **kwargs)

    return changed


def renaming(
    change: Callable[Concatenate[Jaxpr, Names, P], Jaxpr],
) -> Callable[Concatenate[Jaxpr, P], tuple[Jaxpr, Names]]:
    """A pass `at_every_level` that also returns the renames that `change` adds to its `Names`."""

    @functools.wraps(change)
    def changed(jaxpr: Jaxpr, /, *args: P.args, **kwargs: P.kwargs) -> tuple[Jaxpr, Names]:
        names: Names = {}
        return at_every_level(change)(jaxpr, names, *args, **kwargs), names

    return changed


def loop_bodies(eqn: JaxprEqn) -> list[ClosedJaxpr]:
    """The programs of a loop or branch; empty for any other equation."""
    loop = Loop.of(eqn)
    return list(loop.bodies) if loop else []


def runs_of(eqn: JaxprEqn) -> int:
    """The trip count of a loop; 1 if it depends on data."""
    return eqn.params["length"] if eqn.primitive is p.scan_p else 1


def counts_of(scan: JaxprEqn) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many of the next ones are carried."""
    return scan_counts(scan.params)


@dataclass(frozen=True, eq=False)
class Loop:
    """A loop or branch, read once: what it runs, and how its variables relate inside and outside.

    `links` are pairs of variables outside and inside that are the same value. `invariants` are the
    arguments of the bodies that every run has alike. The first `consts` operands of a scan are
    constants, the next `carry` are carried.
    """

    eqn: JaxprEqn
    bodies: tuple[ClosedJaxpr, ...]
    runs: int
    links: tuple[Link, ...]
    invariants: tuple[Any, ...] = ()
    consts: int = 0
    carry: int = 0

    @property
    def decided_by(self) -> Any | None:
        """The variable that says which branch is taken, or whether a loop runs again."""
        if self.eqn.primitive is p.scan_p:
            return None
        is_while = self.eqn.primitive is p.while_p
        decides = self.bodies[0].jaxpr.outvars[0] if is_while else self.eqn.invars[0]
        return None if isinstance(decides, Literal) else decides

    @staticmethod
    def of(eqn: JaxprEqn) -> Loop | None:
        """The loop or branch that an equation is, if it is one."""
        if eqn.primitive is p.scan_p:
            return _scan(eqn)
        if eqn.primitive is p.while_p:
            return _while(eqn)
        return _cond(eqn) if eqn.primitive is p.cond_p else None


def _scan(eqn: JaxprEqn) -> Loop:
    closed = eqn.params["jaxpr"]
    body, (consts, carry) = closed.jaxpr, counts_of(eqn)
    inside = body.invars[consts : consts + carry]
    links = (
        *_alike(inside, body.outvars),
        *_alike(eqn.invars[: consts + carry], body.invars),
        *_alike(inside, eqn.outvars),
        *_alike(eqn.invars[consts + carry :], body.invars[consts + carry :], 1),
        *_alike(eqn.outvars[carry:], body.outvars[carry:], 1),
    )
    invariants = tuple(body.invars[:consts])
    return Loop(eqn, (closed,), eqn.params["length"], links, invariants, consts, carry)


def _while(eqn: JaxprEqn) -> Loop:
    params = eqn.params
    cond, body = params["cond_jaxpr"].jaxpr, params["body_jaxpr"].jaxpr
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    links = (
        *_alike(eqn.invars[:n_cond], cond.invars),
        *_alike(eqn.invars[n_cond : n_cond + n_body], body.invars),
        *_alike(body.invars[n_body:], body.outvars),
        *_alike(eqn.invars[n_cond + n_body :], body.invars[n_body:]),
        *_alike(body.invars[n_body:], eqn.outvars),
        *_alike(body.invars[n_body:], cond.invars[n_cond:]),
    )
    invariants = (*cond.invars[:n_cond], *body.invars[:n_body])
    return Loop(eqn, (params["cond_jaxpr"], params["body_jaxpr"]), 1, links, invariants)


def _cond(eqn: JaxprEqn) -> Loop:
    branches = tuple(eqn.params["branches"])
    links = [
        link
        for branch in branches
        for link in (
            *_alike(eqn.invars[1:], branch.jaxpr.invars),
            *_alike(eqn.outvars, branch.jaxpr.outvars),
        )
    ]
    return Loop(eqn, branches, 1, tuple(links))


def _alike(outside: Any, inside: Any, more: int = 0) -> Iterator[Link]:
    """Pairs of variables; those of a literal have nothing to tell."""
    for a, b in zip(outside, inside, strict=False):
        if not isinstance(a, Literal) and not isinstance(b, Literal):
            yield a, b, more
