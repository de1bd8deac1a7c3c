"""Equal computations on many tensors are batched, and dealt out to the devices.

Optimizers such as Muon, Shampoo and SOAP orthogonalize or factorize every weight by itself: chains
of products, each of which would be summed over devices, or decompositions, which every device would
compute. If k of them are alike and independent, their operands are stacked, with rows of the stack
on different devices, the computation runs batched, and its results are unstacked
(`rules/stacks.py`): two AllToAlls, if they cost less than what is sent and computed otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard._jax import Var, batching, stack_p, unstack_p
from gshard.graph import LOOPS, Graph, at_every_level, in_order, live, replacing
from gshard.graph.evaluate import equations_of, evaluate
from gshard.graph.regions import bodies, walk
from gshard.graph.source import source_of
from gshard.moving.costs import sent_bytes, timed
from gshard.moving.plan import reshard_cost
from gshard.propagation.flow import Edge, Flow
from gshard.rules.base.rule import RULES, equation_key
from gshard.tensors.annotate import Annotation, annotate_p
from gshard.tensors.sharding import Sharding, Split
from gshard.tensors.tile import byte_size

_HEAVY = (
    p.dot_general_p, p.eigh_p, p.svd_p, p.qr_p, p.lu_p, p.cholesky_p, p.triangular_solve_p,
)  # fmt: skip
_LARGE = (*LOOPS, *_HEAVY)
_MOST = 128  # equations of one computation
_GROWTH = 8  # the most bytes that may enter one, for each that is read and made at its end

Lanes = tuple[Any, ...]  # a variable, or an equation, of each of the computations


@at_every_level
def batch_alike(
    jaxpr: Jaxpr, shardings: Mapping[Any, Sharding], memory_limit: int, remarks: list[str]
) -> Jaxpr:
    """The program with equal computations as one on stacks, where that costs less."""
    if not shardings:
        return jaxpr
    graph, num_devices = Graph.of(jaxpr), next(iter(shardings.values())).num_devices
    price, done = None, set[JaxprEqn]()
    for last in _seeds(graph, least=num_devices // 2):
        needed = _lanes_after(graph, last)
        batch = _EqualParts(graph, {last[0]: last}, needed)
        chain = [eqn for eqn, lanes in needed.items() if lanes == 1 and _is_heavy(eqn)]
        if not _is_chain(chain) or not batch.is_consistent or not done.isdisjoint(last):
            continue
        grown = batch.grown()
        if not grown[-1].is_chain:
            continue
        price = price or _Price(jaxpr, shardings, memory_limit)
        batch, gain = price.best(grown)
        if gain <= 0 or not batch.inputs:  # or one computation, written several times
            continue
        if batch.is_independent and done.isdisjoint(batch.gone):
            done |= batch.gone
            jaxpr = jaxpr.replace(eqns=batch.applied(jaxpr, price.num_devices))
            remarks.append(
                f"at {source_of(last[0])}: {len(last)} equal computations are dealt out, which "
                f"saves the time in which {gain:,.0f} bytes are sent"
            )
    return jaxpr


def _is_heavy(eqn: JaxprEqn) -> bool:
    """Whether it has products or decompositions in it."""
    inside = (e for body in bodies(eqn) for e in walk(body))
    return eqn.primitive in _HEAVY or any(e.primitive in _HEAVY for e in inside)


def _is_chain(heavy: Sequence[JaxprEqn]) -> bool:
    """Whether there is more than one product: of one alone, the operands' splits decide."""
    return len(heavy) > 1 or heavy[0].primitive is not p.dot_general_p


def _kind(eqn: JaxprEqn | None) -> Any:
    """Equal for equations that do the same to other variables; None if they cannot be batched."""
    if eqn is None or eqn.effects or eqn.primitive is annotate_p:
        return None
    inside = (e.primitive for body in bodies(eqn) for e in walk(body))
    if not all(each in batching.fancy_primitive_batchers for each in (eqn.primitive, *inside)):
        return None
    if eqn.primitive in LOOPS:
        return eqn.primitive, str([a.aval for a in eqn.invars]), str(eqn.params)
    return equation_key(eqn) if eqn.primitive in RULES else None


def _variables(atoms: Iterable[Any]) -> set[Any]:
    return {a for a in atoms if not isinstance(a, Literal)}


def _seeds(graph: Graph, least: int) -> list[Lanes]:
    """Equal heavy equations without a path from one to another, from the last in the program.

    With less than half as many as there are devices, most devices would do nothing.
    """
    least = max(least, 2)
    heavy: dict[Any, list[JaxprEqn]] = {}
    for eqn in graph.eqns:
        if eqn.primitive in _LARGE and _is_heavy(eqn):
            types = tuple([a.aval for a in (*eqn.invars, *eqn.outvars)])
            heavy.setdefault((eqn.primitive, types), []).append(eqn)
    several = {name: eqns for name, eqns in heavy.items() if len(eqns) >= least}
    before = _before(graph, [eqn for eqns in several.values() for eqn in eqns])
    found: dict[Any, list[JaxprEqn]] = {}
    for name, eqns in several.items():
        levels: list[int] = []  # those with a path from one of the level below, as bits
        for eqn in eqns:
            own, needs = before[eqn]
            level = next((n for n in reversed(range(len(levels))) if levels[n] & needs), -1) + 1
            levels += [0] if level == len(levels) else []
            levels[level] |= own
            found.setdefault((name, _kind(eqn), level), []).append(eqn)
    alike = [tuple(eqns) for (_, kind, _), eqns in found.items() if kind is not None]
    enough = [lanes for lanes in alike if len(lanes) >= least]
    return sorted(enough, key=lambda lanes: -graph.numbers[lanes[0]])


def _before(graph: Graph, eqns: Iterable[JaxprEqn]) -> dict[JaxprEqn, tuple[int, int]]:
    """The bit of each of some equations, and the bits of those that it depends on."""
    bits = {eqn: 1 << number for number, eqn in enumerate(eqns)}
    found, of = dict[JaxprEqn, tuple[int, int]](), dict[Any, int]()
    for eqn in graph.eqns if bits else ():
        needs = 0
        for a in eqn.invars:
            needs |= 0 if isinstance(a, Literal) else of.get(a, 0)
        if own := bits.get(eqn, 0):
            found[eqn] = own, needs
        if own | needs:
            of.update(dict.fromkeys(eqn.outvars, own | needs))
    return found


def _lanes_after(graph: Graph, last: Lanes) -> dict[JaxprEqn, int]:
    """The computations that need an equation, as the bits of a number, by their last equations."""
    found = {eqn: 1 << number for number, eqn in enumerate(last)}
    for eqn in reversed(graph.eqns):
        if lanes := found.get(eqn):
            for maker in filter(None, map(graph.maker, eqn.invars)):
                found[maker] = found.get(maker, 0) | lanes
    return found


@dataclass(frozen=True, eq=False)
class _EqualParts:
    """Equal computations: the equations of all, by those of the first; so are all variables."""

    graph: Graph
    eqns: dict[JaxprEqn, Lanes]
    needed: Mapping[JaxprEqn, int]  # by which of them an equation is, as bits

    @functools.cached_property
    def body(self) -> list[JaxprEqn]:
        """The equations of the first one, in order."""
        return sorted(self.eqns, key=lambda eqn: self.graph.numbers[eqn])

    @functools.cached_property
    def made(self) -> dict[Any, Lanes]:
        """The variables that they make."""
        results = (zip(*(e.outvars for e in own), strict=True) for own in self.eqns.values())
        return {own[0]: own for each in results for own in each}

    @functools.cached_property
    def reads(self) -> dict[Lanes, None]:
        """The variables that they read."""
        operands = (zip(*(e.invars for e in own), strict=True) for own in self.eqns.values())
        reads = (own for each in operands for own in each)
        return {own: None for own in reads if not isinstance(own[0], Literal)}

    @functools.cached_property
    def inputs(self) -> dict[Any, Lanes]:
        """The variables from elsewhere, another for each."""
        new = (own for own in self.reads if len(set(own)) > 1 and own[0] not in self.made)
        return {own[0]: own for own in new}

    @functools.cached_property
    def shared(self) -> list[Any]:
        """The variables that all of them read."""
        return [own[0] for own in self.reads if len(set(own)) == 1]

    @functools.cached_property
    def core(self) -> set[JaxprEqn]:
        """The equations that depend on heavy ones; others may run here and elsewhere."""
        found, made = set(), set[Any]()
        for eqn in self.body:
            if _is_heavy(eqn) or not made.isdisjoint(_variables(eqn.invars)):
                found.add(eqn)
                made.update(eqn.outvars)
        return found

    @functools.cached_property
    def gone(self) -> set[JaxprEqn]:
        """The core of all computations, and what is for them alone."""
        found = {eqn for first in self.core for eqn in self.eqns[first]}
        for first in reversed(self.body):
            results = [v for eqn in self.eqns[first] for v in eqn.outvars]
            if not any(self._is_read(v, found) for v in results):
                found.update(self.eqns[first])
        return found

    def _is_read(self, var: Any, besides: set[JaxprEqn]) -> bool:
        users = self.graph.users(var)
        return self.graph.uses(var) > sum(e.invars.count(var) for e in users if e in besides)

    @functools.cached_property
    def results(self) -> list[Any]:
        """The variables of the core that others read."""
        made = (var for eqn in self.body if eqn in self.core for var in eqn.outvars)
        return [v for v in made if any(self._is_read(own, self.gone) for own in self.made[v])]

    @property
    def is_consistent(self) -> bool:
        """Whether each has variables of its own, always the same ones."""
        count, known = len(next(iter(self.eqns.values()))), {**self.made, **self.inputs}
        return all(
            len(set(own)) == 1 or (len(set(own)) == count and known[own[0]] == own)
            for own in self.reads
        )

    @property
    def is_chain(self) -> bool:
        """Whether it has more than one product."""
        return _is_chain([e for e in self.eqns if _is_heavy(e)])

    @property
    def is_independent(self) -> bool:
        """Whether no input depends on a result, of whichever computation."""
        after = {v for eqn in self.gone for v in eqn.outvars}
        for eqn in self.graph.eqns:
            if not after.isdisjoint(_variables(eqn.invars)):
                after.update(eqn.outvars)
        needed = {*self.shared, *(v for own in self.inputs.values() for v in own)}
        return after.isdisjoint(needed)

    def grown(self) -> list[_EqualParts]:
        """This one, and those with more and more of what makes its inputs."""
        found, most = [self], _GROWTH * _bytes([*self.inputs, *self.results])
        while (more := found[-1].with_maker()) and len(more.eqns) < _MOST:
            if _bytes(more.inputs) > most:
                break
            found.append(more)
        return found

    def with_maker(self) -> _EqualParts | None:
        """With what makes an input: the last that is made, of those that are made alike."""
        makers = {self.graph.maker(var): own for var, own in self.inputs.items()}
        order = sorted(filter(None, makers), key=lambda eqn: -self.graph.numbers[eqn])
        return self._with(map(self.graph.maker, makers[eqn]) for eqn in order)

    def with_user(self) -> _EqualParts | None:
        """With what is computed from a result and from other values of theirs alone."""
        results = ([self.graph.users(v) for v in self.made[var]] for var in self.results)
        users = (own for lanes in results for own in zip(*lanes, strict=False))
        more = self._with(own for own in users if not _is_heavy(own[0]))
        return more if more and more.inputs.keys() == self.inputs.keys() else None

    def _with(self, candidates: Iterable[Iterable[Any]]) -> _EqualParts | None:
        """With the first of some equations that are alike, and no others' operands."""
        for own in map(tuple, candidates):
            kinds = set(map(_kind, own))
            if own[0] in self.eqns or None in kinds or len(kinds) > 1:
                continue
            alone = all(self.needed.get(e) == 1 << number for number, e in enumerate(own))
            if _is_heavy(own[0]) and not alone:  # one computation would wait for another
                continue
            more = _EqualParts(self.graph, {**self.eqns, own[0]: own}, self.needed)
            if len(set(own)) == len(own) and more.is_consistent:
                return more
        return None

    def applied(self, jaxpr: Jaxpr, num_devices: int) -> list[JaxprEqn]:
        """The program's equations with one batched computation, and without these."""
        last, count = self.body[-1], len(self.eqns[self.body[0]])
        split = Split.of(np.arange(num_devices))

        def dealt(stack: Any) -> JaxprEqn:
            rest = (None,) * (len(stack.aval.shape) - 1)
            note = Annotation.of_sharding(
                "equal computations", Sharding((split, *rest), num_devices)
            )
            return replacing(last, annotate_p, [stack], Var(stack.aval), annotation=note)

        eqns: list[JaxprEqn] = []
        stacks = []
        for var, own in self.inputs.items():
            stack = Var(var.aval.update(shape=(count, *var.aval.shape)))
            eqns += [replacing(last, stack_p, list(own), stack, axis=0), dealt(stack)]
            stacks += eqns[-1].outvars
        names = {"constvars": [], "debug_info": jaxpr.debug_info.with_unknown_names()}
        invars = [*self.inputs, *self.shared]
        one = jaxpr.replace(invars=invars, outvars=self.results, eqns=self.body, **names)
        axes = (0,) * len(stacks) + (None,) * len(self.shared)
        batched = jax.vmap(lambda *args: evaluate(ClosedJaxpr(one, ()), args), in_axes=axes)
        made, outs = equations_of(batched, [*stacks, *self.shared], like=last)
        eqns += made
        for var, out in zip(self.results, outs, strict=True):
            eqns.append(dealt(out))
            unstack = replacing(last, unstack_p, eqns[-1].outvars, None, axis=0)
            eqns.append(unstack.replace(outvars=list(self.made[var])))
        kept = [e for e in jaxpr.eqns if e not in self.gone]
        return in_order(live([*eqns, *kept], jaxpr.outvars))


def _bytes(variables: Iterable[Any]) -> int:
    return sum(byte_size(v.aval.shape, v.aval.dtype) for v in variables)


class _Price:
    """What is saved by batches."""

    def __init__(self, jaxpr: Jaxpr, shardings: Mapping[Any, Sharding], memory_limit: int):
        self.shardings = shardings
        self.num_devices = next(iter(shardings.values())).num_devices
        self.flow = Flow(jaxpr, self.num_devices, memory_limit)
        self.edges = {edge.eqn: edge for edge in self.flow.edges}
        self.known: dict[Any, float] = {}  # work of equations, and costs of sets of them

    def best(self, found: Sequence[_EqualParts]) -> tuple[_EqualParts, float]:
        """The batch with as much before it, and then after it, as saves most; and what it saves."""
        chains = [each for each in found if each.is_chain]
        gain, _, batch = max((self.gain(b, found[-1]), n, b) for n, b in enumerate(chains))
        while (more := batch.with_user()) and (after := self.gain(more, found[-1])) >= gain:
            batch, gain = more, after
        return batch, gain

    def gain(self, batch: _EqualParts, among: _EqualParts) -> float:
        """The cost of computations as they are, less that of stacks, of rows, and of results.

        What `among` the equations of a larger one remains as it is moves its operands by itself.
        """
        count = self.num_devices
        rows = -(-len(batch.eqns[batch.body[0]]) // count)
        every = frozenset(among.gone | batch.gone)
        total = self._cost(every) - self._cost(every - batch.gone)
        for var in (*batch.inputs, *batch.results):
            # A replicated operand is sliced on each device, and a replicated result is gathered.
            if not self.shardings[var].is_replicated:
                total -= timed(sent_bytes("all_to_all", _bytes([var]) * rows, count))
            elif var in batch.made:
                total -= timed(sent_bytes("all_gather", _bytes([var]) * rows, count))
        for var in batch.shared:
            here, aval = self.shardings[var], var.aval
            everywhere = Sharding.replicated(here.rank, count)
            total -= reshard_cost(here, everywhere, aval.shape, aval.dtype)
        return total - rows * sum(map(self._work, self._inside(batch.eqns)))

    def _cost(self, eqns: frozenset[JaxprEqn]) -> float:
        """The cost of equations as they are."""
        if eqns not in self.known:
            self.known[eqns] = self.flow.cost(self.shardings, self._inside(eqns)).cost
        return self.known[eqns]

    def _work(self, edge: Edge) -> float:
        """The work of an operator on one device."""
        eqn, count = edge.eqn, self.num_devices
        if eqn not in self.known:
            whole = {v: Sharding.replicated(len(v.aval.shape), count) for v in edge.named}
            cost = self.flow.cost(whole, [edge])
            self.known[eqn] = cost.cost - cost.sent
        return self.known[eqn]

    def _inside(self, eqns: Iterable[JaxprEqn]) -> list[Edge]:
        """The operators of equations, and of the bodies in them."""
        found = []
        for eqn in eqns:
            inner = [i for b in bodies(eqn) for i in walk(b)] if eqn.primitive in LOOPS else ()
            found += [self.edges[e] for e in (eqn, *inner) if e in self.edges]
        return found
