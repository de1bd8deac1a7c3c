"""Factors: the dims of an operator's operands and results, by name, as in an einsum.

`i k, k j -> i j` describes a matrix product: a split of `i` propagates from the left operand to the
result, a split of `k` leaves partial sums. Propagation and partitioning read
the same description.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from gshard.tensors.sharding import Sharding, Shardings, Split, Targets, compatible

Factor = str
Dim = tuple[Factor, ...]  # the factors of one dim, major to minor; () is a dim that cannot be split
Dims = Sequence[Dim]  # of a tensor
Shape = tuple[int, ...]
Shapes = list[Shape]
Assignment = Mapping[Factor, Split | None]  # a split, or none, of every factor


@dataclass(frozen=True)
class Factors:
    """The dims of an operator's operands and results in terms of factors of given sizes.

    `reduced` factors occur in operands only; the value says how partial results are combined: sum,
    max, min, prod, and, or, xor. `priority` factors are propagated first (the batch dims of a
    contraction). `replicated` factors cannot be split; a split of one may be taken over by one of
    the factors that it has in `instead`, which costs an AllToAll where a gather costs the entire
    operand. `resized` factors have another size in each tensor; a split propagates through them to
    a dim that has at least a row for each tile. The rows of `ordered` factors are told apart by
    their number, as a cumulative sum does; None is not known.
    """

    operands: tuple[tuple[Dim, ...], ...]
    results: tuple[tuple[Dim, ...], ...]
    sizes: Mapping[Factor, int]
    reduced: Mapping[Factor, str] = field(default_factory=dict)
    priority: tuple[Factor, ...] = ()
    replicated: frozenset[Factor] = frozenset()
    resized: frozenset[Factor] = frozenset()
    instead: Mapping[Factor, tuple[Factor, ...]] = field(default_factory=dict)
    ordered: frozenset[Factor] | None = None

    @staticmethod
    def of(
        eqn: JaxprEqn,
        operands: Sequence[Sequence[Factor | None]],
        results: Sequence[Sequence[Factor | None]],
        reduced: Mapping[Factor, str] | None = None,
        priority: Sequence[Factor] = (),
        resized: Sequence[Factor] = (),
        ordered: Iterable[Factor] | None = None,
    ) -> Factors:
        """Factors of an equation, one or none (None) per dim, with sizes from the shapes.

        `resized` factors have different sizes in different tensors (a slice, a strided window): a
        split propagates through them, but the operator needs its own partition rule.
        """
        sizes: dict[Factor, int] = {}
        for names, atom in [
            *zip(operands, eqn.invars, strict=True),
            *zip(results, eqn.outvars, strict=True),
        ]:
            for name, n in zip(names, atom.aval.shape, strict=True):
                if name is not None:
                    known = sizes.setdefault(name, n)
                    assert known == n or name in resized, (eqn.primitive, name, known, n)
        return Factors(
            tuple(tuple((f,) if f is not None else () for f in names) for names in operands),
            tuple(tuple((f,) if f is not None else () for f in names) for names in results),
            sizes,
            priority=tuple(priority),
            resized=frozenset(resized),
            ordered=None if ordered is None else frozenset(ordered),
            **combining(eqn, reduced or {}),
        )

    def unsplit(self, factors: Collection[Factor]) -> Factors:
        """The same with `factors` that cannot be split: any other one may take a split over."""
        free = [f for f in self.sizes if f not in self.replicated and f not in factors]
        takers = tuple(f for f in free if f not in self.reduced)
        instead = {**self.instead, **dict.fromkeys(factors, takers)}
        return replace(self, replicated=self.replicated | set(factors), instead=instead)

    def taken_over(self, factor: Factor, split: Split) -> list[Factor]:
        """The factors that may get the split of a dim: itself, unless it cannot be split."""
        if factor not in self.replicated:
            return [factor]
        return [f for f in self.instead.get(factor, ()) if split.tiles <= self.sizes[f]]

    def reduction(self, chosen: Assignment) -> str:
        """How results are combined if factors are split as `chosen`; empty if they need not be."""
        kinds = {kind for f, kind in self.reduced.items() if chosen.get(f)}
        (kind,) = kinds or {""}
        return kind


def combining(eqn: JaxprEqn, reduced: Mapping[Factor, str]) -> dict[str, Any]:
    """How partial results over `reduced` factors are combined: for booleans, a sum is an or.

    In a type that has no zero nothing is neutral: those factors are not split.
    """
    if reduced and not all(has_zero(a.aval.dtype) for a in (*eqn.invars, *eqn.outvars)):
        return {"replicated": frozenset(reduced)}
    if eqn.outvars[0].aval.dtype == bool:
        reduced = {f: {"sum": "or", "prod": "and"}.get(kind, kind) for f, kind in reduced.items()}
    return {"reduced": dict(reduced)}


@functools.cache
def has_zero(dtype: Any) -> bool:
    """Whether a type has a zero; that of the scales of MX formats has none (float8_e8m0fnu)."""
    return not jnp.issubdtype(dtype, jnp.floating) or float(np.zeros((), dtype)) == 0


def all_dims(eqn: JaxprEqn) -> Factors:
    """Operands and results have the same dims; size 1, or a scalar, is broadcast."""
    shape = eqn.outvars[0].aval.shape
    names = [f"d{i}" for i in range(len(shape))]
    operands = [
        [name if n == m else None for name, n, m in zip(names, a.aval.shape, shape, strict=True)]
        if a.aval.shape
        else []
        for a in eqn.invars
    ]
    return Factors.of(eqn, operands, [names] * len(eqn.outvars))


def ordered_dims(eqn: JaxprEqn) -> Factors:
    """All dims; along that of the operator, rows have an order."""
    along = eqn.params.get("axis", eqn.params.get("dimension"))
    return replace(all_dims(eqn), ordered=frozenset({f"d{along}"}))


def made_dims(eqn: JaxprEqn) -> Factors:
    """Results that a device makes its own part of, from scalars at most."""
    names = [[f"d{i}" for i in range(len(v.aval.shape))] for v in eqn.outvars]
    return Factors.of(eqn, [[] for _ in eqn.invars], names)


def no_factors(eqn: JaxprEqn) -> Factors:
    """No split propagates through the operator (control flow, callbacks, manual regions)."""
    return Factors(
        tuple(((),) * len(getattr(a.aval, "shape", ())) for a in eqn.invars),
        tuple(((),) * len(getattr(v.aval, "shape", ())) for v in eqn.outvars),
        {},
    )


def decompose(split: Split | None, dim: Dim, sizes: Mapping[Factor, int]) -> dict[Factor, Split]:
    """The splits of a dim's factors that are equivalent to a split of the dim, where they exist."""
    if len(dim) == 1:  # nearly always
        return {} if split is None else {dim[0]: split}
    found: dict[Factor, Split] = {}
    for factor in dim:
        size = sizes[factor]
        if split is None:
            break
        if size == 1 and len(dim) > 1:
            continue
        if split.tiles <= size or factor == dim[-1]:
            found[factor] = split
            break
        if split.tiles % size:
            break
        whole = split.major(size)
        assert whole
        found[factor] = whole
        split = split.minor(split.tiles // size)
    return found


def compose(
    dim: Dim, splits: Mapping[Factor, Split | None], sizes: Mapping[Factor, int]
) -> Split | None:
    """The split of a dim whose factors have these splits; None for what cannot be expressed."""
    if len(dim) == 1:
        return splits.get(dim[0])
    whole: Split | None = None
    for factor in dim:
        split = splits.get(factor)
        if split is None:
            if sizes[factor] > 1:
                break
            continue
        if whole and sizes[factor] % split.tiles:
            break  # padding would be in the middle
        whole = whole.times(split) if whole else split
        if split.tiles != sizes[factor]:
            break
    return whole


# ---------------------------------------------------------------- splits of all factors


def assignments(
    factors: Factors, shardings: Shardings, targets: Targets, kept: Collection[Factor] = ()
) -> Iterator[Assignment]:
    """The splits of factors that operands and results suggest; one, if nothing has to move."""
    options: dict[Factor, list[Split | None]] = {f: [] for f in factors.sizes}
    tensors = [
        *zip(factors.operands, shardings, strict=True),
        *zip(factors.results, targets, strict=True),
    ]
    moved: dict[tuple[Factor, Split], None] = {}  # splits that others may take over
    for dims, sharding in tensors:
        for dim, split in zip(dims, sharding.splits, strict=True):
            for factor, part in decompose(split, dim, factors.sizes).items():
                if factor in factors.replicated:
                    moved |= {(f, part): None for f in factors.taken_over(factor, part)}
                elif part not in options[factor]:
                    options[factor].append(part)
    for taker, part in moved:
        own = [s for s in options[taker] if s and compatible((s, part))]
        finer = [s.times(part) for s in own if s.tiles * part.tiles <= factors.sizes[taker]]
        options[taker] += [s for s in (part, *finer) if s not in options[taker]]
    if all(len(o) <= 1 for o in options.values()):
        agreed = {f: (o[0] if o else None) for f, o in options.items()}
        if _composable(agreed, factors) and _fits(agreed, factors, tensors):
            yield agreed
            return
    ragged: dict[Factor, list[Split | None]] = {  # rows stay in order
        f: [s for s in o if s and s.ragged] for f, o in options.items()
    }
    free = [ragged[f] or ([*o] if o and f in kept else [*o, None]) for f, o in options.items()]
    none = True
    for splits in itertools.product(*free):
        candidate = dict(zip(options, splits, strict=True))
        if compatible(tuple([s for s in splits if s])) and _composable(candidate, factors):
            none = False
            yield candidate
    if none:  # the kept splits are incompatible
        yield from assignments(factors, shardings, targets)


def _fits(chosen: Assignment, factors: Factors, tensors: Sequence[tuple[Dims, Sharding]]) -> bool:
    """Whether nothing has to move: all dims are already split like their factors."""
    reduced = any(chosen[f] for f in factors.reduced)
    return not reduced and all(
        compose(dim, chosen, factors.sizes) is split
        for dims, sharding in tensors
        for dim, split in zip(dims, sharding.splits, strict=True)
    )


def _composable(chosen: Assignment, factors: Factors) -> bool:
    """Whether no dim has to drop the split of one of its factors, as uneven tiles require."""
    for dims in [*factors.operands, *factors.results]:
        for dim in dims:
            if len(dim) > 1:
                kept = decompose(compose(dim, chosen, factors.sizes), dim, factors.sizes)
                if any(kept.get(f) is not chosen[f] for f in dim):
                    return False
    return True


def shard_dims(dims: Dims, chosen: Assignment, factors: Factors, num_devices: int) -> Sharding:
    """The sharding of a tensor with these dims if the factors are split as `chosen`."""
    return Sharding(tuple([compose(d, chosen, factors.sizes) for d in dims]), num_devices)


def shard_result(dims: Dims, chosen: Assignment, factors: Factors, num_devices: int) -> Sharding:
    """The sharding of a result, before it is reduced over factors that occur in operands only."""
    here = shard_dims(dims, chosen, factors, num_devices)
    splits = [s for f, s in chosen.items() if s and f in factors.reduced]
    return here.unreduced_over(splits) if splits else here


def local_dims(
    dims: Dims, chosen: Assignment, factors: Factors, shape: Sequence[int]
) -> tuple[int, ...]:
    """The local shape of such a tensor: a dim is the product of its factors' parts."""
    local = []
    for dim, n in zip(dims, shape, strict=True):
        if len(dim) < 2:
            split = chosen.get(dim[0]) if dim else None
            local.append(split.rows(n) if split else n)
        else:
            kept = decompose(compose(dim, chosen, factors.sizes), dim, factors.sizes)
            local.append(
                math.prod(-(-factors.sizes[f] // (kept[f].tiles if f in kept else 1)) for f in dim)
            )
    return tuple(local)
