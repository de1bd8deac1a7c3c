"""Concatenated tensors are computed on part by part, where their tiles would have to move.

`z = jnp.concatenate([one, other])` of tensors whose rows are split has tiles of its own: nearly all
rows change devices, and those of the gradient go back. What follows is mostly by rows: then each
operator runs on the parts, in their tiles. Products that sum over rows are sums of products, and
the parts are concatenated where an operator needs all of them at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard._jax import Var
from gshard.capture.simplify.painting import painting
from gshard.graph import Graph, at_every_level, live, renamed, replacing
from gshard.graph.row_map import Axis, entire, through
from gshard.graph.source import source_of
from gshard.rules.base.layers import ROW_MAPS, layers_of
from gshard.rules.base.primitives import row_map_p
from gshard.rules.base.rule import RULES, Elementwise
from gshard.tensors.annotate import Annotation, annotate_p
from gshard.tensors.factors import Dim
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import byte_size

_SUMS = (p.dot_general_p, p.reduce_sum_p)
_BATCHED = (p.gather_p, p.scatter_add_p)  # along their batch dims
_BY_ROWS = (
    *_SUMS, *_BATCHED, p.reduce_max_p, p.reduce_min_p, p.broadcast_in_dim_p, p.transpose_p,
    p.reshape_p, p.squeeze_p,
)  # fmt: skip
_SHAPES = {p.broadcast_in_dim_p: "shape", p.reshape_p: "new_sizes", p.iota_p: "shape"}


@at_every_level
def compute_in_parts(
    jaxpr: Jaxpr, shardings: Mapping[Any, Sharding], memory_limit: int, remarks: list[str]
) -> Jaxpr:
    """The program with what follows such a concatenation on its parts, where less is moved."""
    for eqn in jaxpr.eqns:
        if eqn.primitive is p.concatenate_p and _moves(eqn, shardings):
            found = _InParts(Graph.of(jaxpr), shardings, eqn)
            eqns = live(list(found.eqns()), jaxpr.outvars)
            if found.after < found.before:
                remarks.append(f"at {source_of(eqn)}: {len(eqn.invars)} parts are computed on")
                return jaxpr.replace(eqns=eqns)
    return jaxpr


def _moves(eqn: JaxprEqn, shardings: Mapping[Any, Sharding]) -> bool:
    """Whether tensors of equal size, split alike along a dim, are concatenated along it."""
    dim, shapes = eqn.params["dimension"], {a.aval.shape for a in eqn.invars}
    if len(shapes) > 1 or len(eqn.invars) < 2 or any(isinstance(a, Literal) for a in eqn.invars):
        return False
    splits = {shardings[a].splits[dim] for a in (*eqn.invars, *eqn.outvars)}
    return len(splits) == 1 and None not in splits


class _Parts(NamedTuple):
    """The variables that a tensor consists of, one behind the other along a dim."""

    dim: int
    vars: tuple[Any, ...]


class _InParts:
    """A program in which what is concatenated by `start` is not, and what that moves, in bytes."""

    def __init__(self, graph: Graph, shardings: Mapping[Any, Sharding], start: JaxprEqn):
        self.graph, self.shardings, self.start = graph, shardings, start
        self.count = len(start.invars)
        self.rows = start.invars[0].aval.shape[start.params["dimension"]]
        self.parts: dict[Any, _Parts] = {}
        self.whole: set[Any] = set()  # tensors in parts that are concatenated, too
        self.terms: dict[Any, Sequence[JaxprEqn]] = {}  # of sums over parts
        self.before = self.after = 0

    def eqns(self) -> Iterator[JaxprEqn]:
        """The equations."""
        same: dict[Any, Any] = {}
        for eqn in self.graph.eqns:
            eqn = renamed(eqn, same) if same else eqn
            if eqn is self.start:
                self._split(eqn, _Parts(eqn.params["dimension"], tuple(eqn.invars)))
            elif not any(a in self.parts for a in _variables(eqn)):
                yield eqn
            elif (found := self._rearranged(eqn)) is not None:
                if len(found.vars) == 1:
                    ((part,), (out,)) = found.vars, eqn.outvars
                    same[out] = part
                    self.before += self._bytes(out)
                    if any(out is a for a in self.graph.results):
                        yield from painting(eqn, [entire(part, out.aval.shape)])
                else:
                    self._split(eqn, found)
            elif (factor := self._factor(eqn)) is not None:
                yield from self._by_part(eqn, factor)
            else:
                for a in dict.fromkeys(_variables(eqn)):
                    yield from self._joined(eqn, a)
                yield eqn
        for a in self.graph.results:
            if not isinstance(a, Literal) and a in self.parts:
                yield from self._joined(self.start, a)

    def _split(self, eqn: JaxprEqn, parts: _Parts) -> None:
        self.parts[eqn.outvars[0]] = parts
        self.before += self._bytes(eqn.outvars[0])

    def _bytes(self, var: Any) -> int:
        here = self.shardings.get(var)
        return byte_size(here.local_shape(var.aval.shape), var.aval.dtype) if here else 0

    # ------------------------------------------------------------ one equation

    def _rearranged(self, eqn: JaxprEqn) -> _Parts | None:
        """The parts that a slice, roll or concatenation of parts consists of."""
        found = dict[int, Any]()
        for layer in layers_of(eqn) if eqn.primitive in ROW_MAPS else ():
            source = None if layer.is_constant else eqn.invars[layer.source]
            if isinstance(source, Literal) or source not in self.parts:
                return None
            dim, parts = self.parts[source]
            behind = (Axis(k * self.rows, self.rows, dim) for k in range(self.count))
            own = (
                entire(v, v.aval.shape).along(dim, at) for v, at in zip(parts, behind, strict=True)
            )
            for part in through(layer, own):
                shape, axis = part.source.aval.shape, part.axes[dim]
                if axis.at % self.rows or not part.along(dim, axis._replace(at=0)).is_all(shape):
                    return None
                found[axis.at] = part.source
        vars = tuple(var for _, var in sorted(found.items()))
        return _Parts(dim, vars) if len(vars) in (1, self.count) else None

    def _factor(self, eqn: JaxprEqn) -> str | None:
        """The factor of an operator's dims along which it runs part by part."""
        rule = RULES.get(eqn.primitive)
        able = isinstance(rule, Elementwise) or eqn.primitive in _BY_ROWS
        if rule is None or not able or len(eqn.outvars) > 1 or eqn.effects:
            return None
        factors = rule.factors(eqn)
        made = [names for names in factors.results[0] if names]
        for a, dims in zip(eqn.invars, factors.operands, strict=True):
            if isinstance(a, Literal) or a not in self.parts:
                continue
            names = dims[self.parts[a].dim]
            summed = eqn.primitive in _SUMS and names and names[0] in factors.reduced
            if _is_usual(eqn, names) and (names in made or summed):
                return names[0]
        return None

    def _by_part(self, eqn: JaxprEqn, factor: str) -> Iterator[JaxprEqn]:
        """An operator on each of the parts, whose results are parts, or are added up."""
        factors, operands = RULES[eqn.primitive].factors(eqn), list[Sequence[Any]]()
        for a, dims in zip(eqn.invars, factors.operands, strict=True):
            dim = next((d for d, names in enumerate(dims) if names == (factor,)), None)
            if dim is not None:
                yield from self._cut(eqn, a, dim)
                operands.append(self.parts[a].vars)
            else:
                if not isinstance(a, Literal) and a in self.parts:
                    yield from self._joined(eqn, a, factors.operands[len(operands)])
                operands.append((a,) * self.count)
        (out,) = eqn.outvars
        made = next((d for d, n in enumerate(factors.results[0]) if n == (factor,)), None)
        shape = tuple(self.rows if d == made else n for d, n in enumerate(out.aval.shape))
        results = tuple(Var(out.aval.update(shape=shape)) for _ in range(self.count))
        named = _SHAPES.get(eqn.primitive)
        params = eqn.params | ({named: shape} if named else {})
        made_of = zip(zip(*operands, strict=True), results, strict=True)
        terms = [eqn.replace(invars=[*own], outvars=[v], params=params) for own, v in made_of]
        yield from terms
        if made is not None:
            self.parts[out] = _Parts(made, results)
        else:
            self.terms[out] = terms
            yield from _added(eqn, results, out)

    def _cut(self, eqn: JaxprEqn, a: Any, dim: int) -> Iterator[JaxprEqn]:
        """Parts of a tensor along a dim."""
        if a in self.parts and self.parts[a].dim == dim:
            return
        if a in self.parts:
            yield from self._joined(eqn, a)
        shape, maker = a.aval.shape, self.graph.maker(a)
        sizes = tuple(self.rows if d == dim else n for d, n in enumerate(shape))
        results = tuple(Var(a.aval.update(shape=sizes)) for _ in range(self.count))
        self.whole.add(a)
        if maker is not None and maker.primitive is p.iota_p:
            for k, result in enumerate(results):
                yield from self._counted(maker, dim, k, result)
        elif a in self.terms:  # each by part: of partial sums, only a part is needed where it is
            for term in self.terms[a]:
                yield from self._by_part(term, _made(term, dim)[0])
            for k, result in enumerate(results):
                own = [self.parts[term.outvars[0]].vars[k] for term in self.terms[a]]
                yield from _added(eqn, own, result)
        elif maker is not None and self._is_made(a) and _is_usual(maker, made := _made(maker, dim)):
            yield from self._by_part(maker, made[0])
            return
        else:
            self.after += self._bytes(a)
            for k, result in enumerate(results):
                layer = entire(a, sizes).along(dim, Axis(0, self.rows, dim), k * self.rows)
                yield from painting(replacing(eqn, row_map_p, [], result), [layer])
        self.parts[a] = _Parts(dim, results)

    def _is_made(self, a: Any) -> bool:
        """Whether parts of a tensor are computed from what no device has to send.

        From numbers and iotas, and from sums over parts.
        """
        maker = self.graph.maker(a)
        if a in self.terms or maker is None:
            return maker is not None
        rule, tensors = RULES.get(maker.primitive), [v for v in maker.invars if v.aval.shape]
        able = isinstance(rule, Elementwise) or maker.primitive in (p.iota_p, *_BY_ROWS)
        return able and all(map(self._is_made, tensors))

    def _counted(self, iota: JaxprEqn, dim: int, number: int, result: Any) -> Iterator[JaxprEqn]:
        """A part of numbers that count up along a dim, maybe this one."""
        aval, shift = result.aval, number * self.rows
        plain = iota.params["dimension"] != dim or not shift
        own = result if plain else Var(aval)
        yield iota.replace(outvars=[own], params=iota.params | {"shape": aval.shape})
        if not plain:
            more = Literal(np.asarray(shift, aval.dtype), aval.update(shape=(), weak_type=False))
            yield replacing(iota, p.add_p, [own, more], result)

    def _joined(self, eqn: JaxprEqn, a: Any, dims: Any = None) -> Iterator[JaxprEqn]:
        """The concatenation of a tensor's parts, for an operator that needs all of it."""
        if a not in self.parts or a in self.whole:
            return
        self.whole.add(a)
        dim, parts = self.parts[a]
        if self._is_wanted_split(eqn, dim, dims):
            self.after += self._bytes(a)
        else:  # they are gathered, and then concatenated
            here = self.shardings[a].unsplit([dim])
            note = Annotation.of_sharding("parts for an operator that reads all of them", here)
            gathered = [
                replacing(eqn, annotate_p, [v], Var(v.aval), annotation=note) for v in parts
            ]
            yield from gathered
            parts = tuple(e.outvars[0] for e in gathered)
        yield replacing(eqn, p.concatenate_p, parts, a, dimension=dim)

    def _is_wanted_split(self, eqn: JaxprEqn, dim: int, dims: Any) -> bool:
        """Whether an operator's result is split along the dim of an operand."""
        if dims is None:
            return True
        results = RULES[eqn.primitive].factors(eqn).results[0]
        here = self.shardings[eqn.outvars[0]].splits
        return any(here[d] for d, names in enumerate(results) if names and names == dims[dim])


def _is_usual(eqn: JaxprEqn, names: Dim) -> bool:
    """Whether an operator runs part by part along a dim with these factors."""
    factors = RULES[eqn.primitive].factors(eqn)
    if len(names) != 1 or names[0] in factors.replicated | factors.resized:
        return False
    dims = (d for dims in (*factors.operands, *factors.results) for d in dims)
    if any(names[0] in d and d != names for d in dims):  # a part of a merged dim
        return False
    return eqn.primitive not in _BATCHED or names[0].startswith("b")


def _made(eqn: JaxprEqn, dim: int) -> Dim:
    """The factors of a dim of the result."""
    return RULES[eqn.primitive].factors(eqn).results[0][dim]


def _added(eqn: JaxprEqn, terms: Sequence[Any], result: Any) -> Iterator[JaxprEqn]:
    """The equations of a sum."""
    total, *others = terms
    for n, part in enumerate(others, 2):
        more = result if n == len(terms) else Var(result.aval)
        yield replacing(eqn, p.add_p, [total, part], more)
        total = more


def _variables(eqn: JaxprEqn) -> list[Any]:
    return [a for a in eqn.invars if not isinstance(a, Literal)]
