"""What gshard knows about each primitive: one rule, read by propagation and by partitioning.

Most operators are described by *factors*: a name for every dimension of every operand and result,
as in an einsum. `i k, k j -> i j` says all there is to say about a matrix product: a split of `i`
travels from the left operand to the result, a split of `k` leaves partial sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
from jax.extend.core import JaxprEqn, Primitive

from gshard.sharding import Sharding, Split
from gshard.tile import Tile

Factor = str
Dim = tuple[Factor, ...]  # the factors of one dim, major to minor; () is a dim that must be whole
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Factors:
    """The dims of an operator's operands and results in terms of factors of given sizes.

    `reduced` factors stand in operands only; the value says how partial results combine: sum, max,
    min, prod, and, or, xor. `priority` factors are propagated first (the batch dims of a
    contraction). `whole` factors cannot be split. `resized` factors have another size in each
    tensor; they pass a split on to a dim that has a row for every tile.
    """

    operands: tuple[tuple[Dim, ...], ...]
    results: tuple[tuple[Dim, ...], ...]
    sizes: Mapping[Factor, int]
    reduced: Mapping[Factor, str] = field(default_factory=dict)
    priority: tuple[Factor, ...] = ()
    whole: frozenset[Factor] = frozenset()
    resized: frozenset[Factor] = frozenset()

    @staticmethod
    def of(
        eqn: JaxprEqn,
        operands: Sequence[Sequence[Factor | None]],
        results: Sequence[Sequence[Factor | None]],
        reduced: Mapping[Factor, str] | None = None,
        priority: Sequence[Factor] = (),
        resized: Sequence[Factor] = (),
    ) -> Factors:
        """Factors of an equation, one or none (None) per dim; sizes are read off the shapes.

        `resized` factors have different sizes in different tensors (a slice, a strided window): a
        split travels along them, but the operator needs a partition rule of its own.
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
            reduced or {},
            tuple(priority),
            resized=frozenset(resized),
        )


def no_factors(eqn: JaxprEqn) -> Factors:
    """Nothing travels through the operator by itself (control flow, borders of manual regions)."""
    return Factors(
        tuple(((),) * len(a.aval.shape) for a in eqn.invars),
        tuple(((),) * len(v.aval.shape) for v in eqn.outvars),
        {},
    )


def decompose(split: Split | None, dim: Dim, sizes: Mapping[Factor, int]) -> dict[Factor, Split]:
    """The splits of a dim's factors that a split of the dim amounts to, as far as there are any."""
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
    """The split of a dim whose factors are split like that; what cannot be said is left whole."""
    whole: Split | None = None
    for factor in dim:
        split = splits.get(factor)
        if split is None:
            if sizes[factor] > 1:
                break
            continue
        if whole and sizes[factor] % split.tiles:
            break  # padding would stand in the middle
        whole = whole.times(split) if whole else split
        if split.tiles != sizes[factor]:
            break
    return whole


class Context(Protocol):
    """What a partition rule may ask of the partitioner."""

    place: Any
    memory_limit: int

    def reshard(self, tile: Tile, target: Sharding, reason: str) -> Tile:
        """`tile` under another sharding; asking twice moves it once."""
        ...

    def inner(self) -> Context:
        """A context for the body of a loop or branch, whose values may not leave it."""
        ...

    def run_body(self, closed: Any, tiles: Sequence[Tile]) -> list[Tile]:
        """Partition the body of a loop or branch, called with `tiles`."""
        ...

    def sharding(self, var: Any) -> Sharding:
        """The sharding that propagation gave a variable."""
        ...


LocalOp = Callable[[Context, JaxprEqn, list[Tile], list[Shape]], Sequence[jax.Array]]
PartitionRule = Callable[[Context, JaxprEqn, list[Tile], list[Sharding]], list[Tile]]


def bind_local(
    ctx: Context, eqn: JaxprEqn, tiles: list[Tile], shapes: list[Shape]
) -> Sequence[jax.Array]:
    """The primitive itself, on local arrays."""
    params = eqn.primitive.get_bind_params(eqn.params)
    out = eqn.primitive.bind(*(t.array for t in tiles), **params)
    return out if eqn.primitive.multiple_results else [out]


@dataclass(frozen=True)
class Doc:
    """An operator's row in docs/operators.md: which dims split how, and what it sends."""

    free: str = ""
    halo: str = ""  # by halo exchange or CollectivePermutes
    gather: str = ""  # by collectives over all tiles of a dim
    refused: str = ""  # why there is no way at all


@dataclass(frozen=True)
class Rule:
    """How a primitive's dims relate, and how it runs on tiles.

    `local` computes the results from tiles of which every dim is split like its factors.
    `partition` takes over where that is not enough: it gets the operands as they are and the
    shardings wanted for the results, and may return other shardings. `level` orders propagation:
    0 before 1. `doc` is the operator's row in docs/operators.md.
    """

    factors: Callable[[JaxprEqn], Factors]
    local: LocalOp = bind_local
    partition: PartitionRule | None = None
    level: int = 1
    doc: Doc = Doc()


RULES: dict[Primitive, Rule] = {}


def register(rule: Rule, *primitives: Primitive) -> None:
    """Make `rule` the rule of `primitives`; each has exactly one."""
    for primitive in primitives:
        assert primitive not in RULES, primitive
        RULES[primitive] = rule
