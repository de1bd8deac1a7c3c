"""Attention scores: the equations that compute a value for every query and key.

A region is all of them around one product of queries and keys: masks, the softmax, and in a
gradient its backward pass. It is found by following dims through equations, so neither names nor
the exact form of the softmax matter. It ends at sums (or maxima) over keys or over queries, whose
results have only the other of the two dims.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from jax.extend.core import JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard._jax import Var, optimization_barrier_p
from gshard.graph import Graph, renamed
from gshard.graph.source import source_of
from gshard.rules.base.ring_pass import KEYS, QUERIES, Sum
from gshard.rules.base.rule import RULES, Elementwise, factors_of
from gshard.tensors.annotate import annotate_p
from gshard.tensors.factors import Factors

_REDUCTIONS = (p.reduce_sum_p, p.reduce_max_p, p.reduce_min_p)
_PASSING = (p.broadcast_in_dim_p, p.transpose_p, p.reshape_p, p.squeeze_p, p.iota_p)


@dataclass(eq=False)
class Scoring:
    """The equations that make scores, and those that sum them up.

    `sources` maps the region's inputs to variables of the program. `names` are names of dims, equal
    for dims that are one dim throughout the region; `whole` are those that cannot be split there.
    """

    seed: JaxprEqn
    dims: dict[Any, tuple[int, int]]  # of all scores: which are of queries, and of keys
    eqns: list[JaxprEqn] = field(default_factory=list)
    exits: list[Sum] = field(default_factory=list)
    sources: dict[Any, Any] = field(default_factory=dict)
    names: dict[Any, tuple[str, ...]] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)

    def name_of(self, over: str) -> str:
        """The name of the dim of queries, or of keys."""
        out = self.seed.outvars[0]
        return self.names[out][self.dims[out][over == KEYS]]


class Finder:
    """Looks for regions in a program."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.results = {v for v in graph.results if not isinstance(v, Literal)}
        self.known: dict[Any, bool] = {}

    def region(self, seed: JaxprEqn, queries: int, keys: int) -> Scoring | str:
        """The region of a product with these dims of queries and keys; or why there is none."""
        (out,) = seed.outvars
        region = Scoring(seed, {out: (queries, keys)})
        found: set[JaxprEqn] = set()
        queue = [out]
        while queue:
            var = queue.pop()
            if var in self.results and self.depends_on_scores(var):
                return "scores are a result of the program, or of a loop's body"
            maker = self.graph.maker(var)
            users = self.graph.users(var) if self.depends_on_scores(var) else []
            for eqn in [maker, *users]:
                if eqn is None or eqn in found:
                    continue
                at = None if eqn is maker else _place_of(eqn, var)
                over = at is not None and _summed_over(eqn, at, region.dims[var])
                if over:
                    found.add(eqn)
                    region.exits.append(Sum(eqn, at or 0, str(over)))
                elif self.passes(eqn):
                    more = _spread(eqn, var, region.dims)
                    if more is None and eqn is not maker:
                        return f"{_located(eqn)} mixes queries or keys"
                    if more is not None:
                        found.add(eqn)
                        queue += more
                elif eqn is not maker:
                    return f"{_located(eqn)} is not computed score by score"
        if not region.exits:
            return "nothing sums the scores over keys or queries"
        sums = {e.eqn for e in region.exits}
        region.eqns = [e for e in self.graph.eqns if e in found and e not in sums]
        region.exits.sort(key=lambda e: self.graph.numbers[e.eqn])
        self.separate(region)
        _name(region)
        _join(region)
        return region

    def is_counted(self, atom: Any) -> bool:
        """Whether a value is an iota, or computed from iotas alone."""
        eqn = self.graph.maker(atom)
        kind = getattr(atom.aval.dtype, "kind", "")  # random keys have none
        if eqn is None or kind not in ("i", "u", "b") or not self.passes(eqn):
            return False
        return all(self.is_counted(a) for a in eqn.invars if not isinstance(a, Literal))

    def separate(self, region: Scoring) -> None:
        """Give every use of an input its own variable.

        One tensor may be queries in one place and keys in another. Positions are not worth sending:
        iotas are recomputed in the region.
        """
        own = {v for eqn in region.eqns for v in eqn.outvars}
        eqns: list[JaxprEqn] = []

        def copied(atom: Any, counted: bool = True) -> Any:
            if isinstance(atom, Literal) or atom in own:
                return atom
            fresh = Var(atom.aval)
            if counted and self.is_counted(atom):
                eqn = self.graph.makers[atom]
                eqns.append(eqn.replace(invars=[*map(copied, eqn.invars)], outvars=[fresh]))
            else:
                region.sources[fresh] = atom
            return fresh

        for eqn in region.eqns:
            invars = [*map(copied, eqn.invars)]
            eqns.append(eqn.replace(invars=invars))
        region.eqns = eqns
        region.exits = [
            replace(e, eqn=e.eqn.replace(invars=[copied(a, counted=False) for a in e.eqn.invars]))
            for e in region.exits
        ]

    def passes(self, eqn: JaxprEqn) -> bool:
        """Whether an equation works on single scores, or multiplies along other dims."""
        if eqn.primitive in (annotate_p, optimization_barrier_p) or eqn.primitive not in RULES:
            return False
        by_element = isinstance(RULES[eqn.primitive], Elementwise) or eqn.primitive in _PASSING
        return len(eqn.outvars) == 1 and (by_element or eqn.primitive is p.dot_general_p)

    def depends_on_scores(self, var: Any) -> bool:
        """Whether a value depends on a product of queries and keys; masks are cheap."""
        if var not in self.known:
            eqn = self.graph.maker(var)
            self.known[var] = eqn is not None and (
                eqn.primitive is p.dot_general_p
                or (
                    self.passes(eqn)
                    and any(
                        self.depends_on_scores(a)
                        for a in eqn.invars
                        if not isinstance(a, Literal) and a.aval.size == eqn.outvars[0].aval.size
                    )
                )
            )
        return self.known[var]


def _located(eqn: JaxprEqn) -> str:
    return f"{eqn.primitive.name} at {source_of(eqn)}"


def _place_of(eqn: JaxprEqn, var: Any) -> int:
    return next(i for i, a in enumerate(eqn.invars) if a is var)


def _summed_over(eqn: JaxprEqn, number: int, dims: tuple[int, int]) -> str | None:
    """Whether an equation sums scores over the keys or over the queries."""
    if eqn.primitive not in (*_REDUCTIONS, p.dot_general_p):
        return None
    queries, keys = (d in Sum(eqn, number, KEYS).summed(number) for d in dims)
    if queries == keys:
        return None
    return KEYS if keys else QUERIES


def _tensors(eqn: JaxprEqn, factors: Factors) -> Iterator[tuple[Any, Any]]:
    yield from zip(eqn.invars, factors.operands, strict=True)
    yield from zip(eqn.outvars, factors.results, strict=True)


def _spread(eqn: JaxprEqn, var: Any, dims: dict[Any, tuple[int, int]]) -> list[Any] | None:
    """The scores that an equation relates to `var`, new ones included; None if it relates none."""
    factors = factors_of(RULES[eqn.primitive], eqn)
    own = next(d for a, d in _tensors(eqn, factors) if a is var)
    wanted = [own[d] for d in dims[var]]
    if any(len(w) != 1 or w[0] in (*factors.reduced, *factors.replicated) for w in wanted):
        return None
    found = []
    for atom, names in _tensors(eqn, factors):
        if isinstance(atom, Literal) or any(w not in names for w in wanted):
            continue
        at = (names.index(wanted[0]), names.index(wanted[1]))
        if dims.setdefault(atom, at) != at:
            return None
        found.append(atom)
    if eqn.outvars[0] not in found:
        return None
    return [a for a in found if a is not var]


def _name(region: Scoring) -> None:
    """Name the dims of all tensors around, and find those that cannot be split."""
    parent: dict[Any, Any] = {}

    def find(node: Any) -> Any:
        while parent.setdefault(node, node) != node:
            node = parent[node]
        return node

    unsplit: list[Any] = []
    tensors: dict[Any, int] = {}
    for eqn in [*region.eqns, *(e.eqn for e in region.exits)]:
        factors = factors_of(RULES[eqn.primitive], eqn)
        seen: dict[str, Any] = {}
        for atom, names in _tensors(eqn, factors):
            if isinstance(atom, Literal):
                continue
            tensors[atom] = len(names)
            for d, name in enumerate(names):
                if len(name) != 1 or name[0] in factors.replicated or name[0] in factors.resized:
                    unsplit.append((atom, d))
                if len(name) == 1:
                    first = seen.setdefault(name[0], (atom, d))
                    parent[find((atom, d))] = find(first)
                    if name[0] in factors.reduced:
                        unsplit.append((atom, d))
    numbers: dict[Any, str] = {}
    for atom, rank in tensors.items():
        roots = [find((atom, d)) for d in range(rank)]
        region.names[atom] = tuple(numbers.setdefault(r, f"n{len(numbers)}") for r in roots)
    along = {region.name_of(KEYS), region.name_of(QUERIES)}
    region.whole = {numbers[find(node)] for node in unsplit} - along


def _join(region: Scoring) -> None:
    """Merge uses of one tensor that have the same dims."""
    kept: dict[Any, Any] = {}
    same = {
        var: kept.setdefault((source, region.names[var]), var)
        for var, source in region.sources.items()
    }

    def joined(eqn: JaxprEqn) -> JaxprEqn:
        return renamed(eqn, same)

    region.eqns = [joined(eqn) for eqn in region.eqns]
    region.exits = [replace(e, eqn=joined(e.eqn)) for e in region.exits]
