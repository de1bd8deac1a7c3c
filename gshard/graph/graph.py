"""Graph: the equations of a program or of a loop's body, with def-use chains and liveness.

Every pass reads a program through this view: which equation defines a value, which ones use it, and
whether it is constant. Graphs are immutable: a pass returns a new list of equations, from which a
new graph is made. Equations and variables are keyed by identity, as they are in JAX.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive
from jax.extend.core import primitives as p

_COPYING = (p.broadcast_in_dim_p, p.convert_element_type_p)


class Graph:
    """Equations in order, the variables that are `results`, and the `known` values of some.

    `aliases` maps variables to equal ones of these equations.
    """

    def __init__(
        self,
        eqns: Iterable[JaxprEqn],
        results: Sequence[Any] = (),
        known: Mapping[Any, Any] | None = None,
        aliases: Mapping[Any, Any] | None = None,
    ):
        self.eqns = list(eqns)
        self.results = list(results)
        self.known = dict(known or {})
        self.aliases = dict(aliases or {})

    @staticmethod
    def of(jaxpr: Jaxpr) -> Graph:
        """The graph of one level of a program: bodies of loops are graphs of their own."""
        return Graph(jaxpr.eqns, jaxpr.outvars)

    @functools.cached_property
    def makers(self) -> dict[Any, JaxprEqn]:
        """The defining equation of each variable."""
        return {v: eqn for eqn in self.eqns for v in eqn.outvars}

    def maker(self, atom: Any) -> JaxprEqn | None:
        """The equation that defines a value; None for literals and inputs."""
        if isinstance(atom, Literal):
            return None
        return self.makers.get(atom) or self.makers.get(self.aliases.get(atom))

    @functools.cached_property
    def _users(self) -> dict[Any, list[JaxprEqn]]:
        found: dict[Any, list[JaxprEqn]] = {}
        for eqn in self.eqns:
            for atom in eqn.invars:
                if not isinstance(atom, Literal):
                    users = found.setdefault(atom, [])
                    if not users or users[-1] is not eqn:
                        users.append(eqn)
        return found

    def users(self, var: Any) -> list[JaxprEqn]:
        """The equations that read a variable, each once."""
        return self._users.get(var, [])

    @functools.cached_property
    def _uses(self) -> dict[Any, int]:
        found: dict[Any, int] = {}
        for atom in [*(a for eqn in self.eqns for a in eqn.invars), *self.results]:
            if not isinstance(atom, Literal):
                found[atom] = found.get(atom, 0) + 1
        return found

    def uses(self, atom: Any) -> int:
        """How often a variable is read, by equations and as a result."""
        return 0 if isinstance(atom, Literal) else self._uses.get(atom, 0)

    @functools.cached_property
    def numbers(self) -> dict[JaxprEqn, int]:
        """The position of each equation."""
        return {eqn: number for number, eqn in enumerate(self.eqns)}

    def fill(self, atom: Any) -> Any:
        """The number that every element of a tensor is, if that is known; else None."""
        while not isinstance(atom, Literal):
            eqn = self.maker(atom)
            if eqn is None or eqn.primitive not in _COPYING:
                return None
            atom = eqn.invars[0]
        return atom.val if np.ndim(atom.val) == 0 else None

    def is_permutation(self, atom: Any) -> bool:
        """Whether indices are a permutation of all rows: the result of an `argsort`."""
        eqn = self.maker(atom)
        if eqn is None:
            return False
        if eqn.primitive in (p.broadcast_in_dim_p, p.reshape_p, p.convert_element_type_p):
            source = eqn.invars[0]
            alike = atom.aval.size == source.aval.size
            integers = np.issubdtype(source.aval.dtype, np.integer)
            return alike and integers and self.is_permutation(source)
        if eqn.primitive is p.select_n_p:  # the wrap-around of negative indices; there are none
            wraps = len(eqn.invars) == 3 and self._wraps(eqn)
            return wraps and self.is_permutation(eqn.invars[1])
        if eqn.primitive is p.sort_p and len(eqn.invars[0].aval.shape) == 1:
            number = next(i for i, v in enumerate(eqn.outvars) if v is atom)
            source = self.maker(eqn.invars[number])
            return source is not None and source.primitive is p.iota_p
        return False

    def _wraps(self, eqn: JaxprEqn) -> bool:
        """Whether a `select_n` is `where(i < 0, i + rows, i)`."""
        mask, index, _ = eqn.invars
        compared = self.maker(mask)
        if compared is None or compared.primitive is not p.lt_p or compared.invars[0] is not index:
            return False
        return self.fill(compared.invars[1]) == 0


# ---------------------------------------------------------------- lists of equations


def live(eqns: Sequence[JaxprEqn], results: Sequence[Any]) -> list[JaxprEqn]:
    """The equations that `results` or effects depend on, in the order given."""
    graph = Graph(eqns)
    kept = {eqn for eqn in eqns if eqn.effects}
    queue = [*results, *(a for eqn in kept for a in eqn.invars)]
    while queue:
        eqn = graph.maker(queue.pop())
        if eqn is not None and eqn not in kept:
            kept.add(eqn)
            queue += eqn.invars
    return [eqn for eqn in eqns if eqn in kept]


def needed_for(wanted: Sequence[Any], eqns: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    """The equations without effects that the `wanted` variables depend on."""
    return live([eqn for eqn in eqns if not eqn.effects], wanted)


def in_order(
    eqns: Sequence[JaxprEqn], may_wait: Callable[[JaxprEqn], bool] = lambda eqn: False
) -> list[JaxprEqn]:
    """The equations, each after those that it depends on, otherwise in the order given.

    One that `may_wait`, and depends on a later one, comes where it is needed instead.
    """
    made = {v: eqn for eqn in eqns for v in eqn.outvars}
    done: dict[JaxprEqn, None] = {}
    opened: set[JaxprEqn] = set()

    def missing(eqn: JaxprEqn) -> list[JaxprEqn]:
        makers = [made.get(a) for a in eqn.invars if not isinstance(a, Literal)]
        return [maker for maker in makers if maker and maker not in done]

    at_their_places = (e for e in eqns if not (missing(e) and may_wait(e)))
    for goal in itertools.chain(at_their_places, eqns):
        stack = [goal] if goal not in done else []
        while stack:
            if makers := missing(stack[-1]):
                assert stack[-1] not in opened, "equations depend on each other"
                opened.add(stack[-1])
                stack += reversed(makers)
            else:
                done[stack.pop()] = None
    return list(done)


def inputs_of(eqns: Sequence[JaxprEqn]) -> list[Any]:
    """The variables that equations read and do not make."""
    made = {v for eqn in eqns for v in eqn.outvars}
    atoms = [a for eqn in eqns for a in eqn.invars if not isinstance(a, Literal)]
    return list(dict.fromkeys(a for a in atoms if a not in made))


def upstream(eqns: Sequence[JaxprEqn], marks: Mapping[Any, int]) -> dict[Any, frozenset[int]]:
    """For every variable the marks of all variables that it depends on, its own included."""
    found: dict[Any, frozenset[int]] = {}
    for eqn in eqns:
        before = frozenset().union(
            *(found.get(a, frozenset()) for a in eqn.invars if not isinstance(a, Literal))
        )
        for var in eqn.outvars:
            found[var] = before | {marks[var]} if var in marks else before
    return found


def renamed(eqn: JaxprEqn, names: Mapping[Any, Any], **changes: Any) -> JaxprEqn:
    """The equation with some of its operands and results renamed."""
    invars = [a if isinstance(a, Literal) else names.get(a, a) for a in eqn.invars]
    outvars = [names.get(v, v) for v in eqn.outvars]
    return eqn.replace(invars=invars, outvars=outvars, **changes)


def replacing(
    eqn: JaxprEqn, primitive: Primitive, operands: Sequence[Any], result: Any, **params: Any
) -> JaxprEqn:
    """An operator without effects, with the source line and the name scope of `eqn`."""
    made = {"invars": list(operands), "outvars": [result], "effects": set()}
    return eqn.replace(primitive=primitive, params=params, **made)


def filling(eqn: JaxprEqn, number: Any, result: Any) -> JaxprEqn:
    """A tensor whose elements are all `number`, a literal or a scalar, in the place of `eqn`."""
    params = {"shape": result.aval.shape, "broadcast_dimensions": (), "sharding": None}
    return replacing(eqn, p.broadcast_in_dim_p, [number], result, **params)
