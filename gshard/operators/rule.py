"""Rule: what gshard knows about a primitive, read by propagation and by partitioning.

Most operators are described by their `Factors` alone; the others add a partition rule of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive

from gshard.graph.evaluate import bind
from gshard.graph.reason import Reason
from gshard.tensors.devices import Place
from gshard.tensors.factors import Factor, Factors, Shape
from gshard.tensors.sharding import Sharding, Split
from gshard.tensors.tile import Tile


@dataclass(frozen=True)
class Shares:
    """What of its costs an operator shares with others.

    `of_sum` is the part of the sum of its result that is to be paid for it, where partial sums are
    added first. `uses` is for each operand the part of a move that is to be paid for this use of
    it, `narrow` the part of its bytes that have to move (see `widening`), and `moved` the forms
    that it has been moved to already, which cost nothing.
    """

    of_sum: float
    uses: tuple[float, ...]
    narrow: tuple[float, ...]
    moved: tuple[frozenset[Sharding], ...]

    def of_move(self, number: int, target: Sharding) -> float:
        """The part to pay for bringing an operand to `target`."""
        return 0.0 if target in self.moved[number] else self.uses[number]


class Context(Protocol):
    """What a partition rule may ask of the partitioner."""

    place: Place
    memory_limit: int
    values: dict[Any, Tile]  # of the variables of the program or body that ran last
    waiting: dict[Any, float]  # the variables whose sum may wait, and the share to pay for it

    def reshard(self, tile: Tile, target: Sharding, reason: Reason) -> Tile:
        """`tile` under another sharding; asking twice moves it once."""
        ...

    def retile(self, tile: Tile, dim: int, size: int, reason: Reason) -> Tile:
        """`tile` with tiles of `size` rows along `dim`, which need not be the usual."""
        ...

    def waits(
        self, var: Any, tile: Tile, reduced: Mapping[Factor, Split], kinds: Mapping[Factor, str]
    ) -> Tile | None:
        """`tile` as a partial sum over the `reduced` splits, if the sum of `var` may wait."""
        ...

    def shares(self, eqn: JaxprEqn, tiles: Sequence[Tile]) -> Shares | None:
        """What an operator shares with others, if anything."""
        ...

    def over_slices(self, var: Any, alike: Any, cost: Callable[[JaxprEqn], float]) -> float:
        """What all slices of a variable cost, of which those that are `alike` are asked once."""
        ...

    def kind(self, eqn: JaxprEqn) -> int | None:
        """Its `equation_key`."""
        ...

    def inner(self) -> Context:
        """A context for the body of a loop or branch, whose values may not leave it."""
        ...

    def run_body(
        self, closed: Any, tiles: Sequence[Tile], leaving: Mapping[int, float] = ...
    ) -> list[Tile]:
        """Partition the body of a loop or branch, called with `tiles`.

        The results with the numbers in `leaving` may be partial sums (see `unreduced.waiting`).
        """
        ...

    def on(self, place: Place, shardings: Mapping[Any, Sharding]) -> Context:
        """A context for other devices, and a program of its own."""
        ...

    def run(self, jaxpr: Any, tiles: Sequence[Tile]) -> list[Tile]:
        """The results of a program, given tiles for its arguments."""
        ...

    def sharding(self, var: Any) -> Sharding:
        """The sharding that propagation gave a variable."""
        ...


LocalOp = Callable[[Context, JaxprEqn, list[Tile], list[Shape]], Sequence[jax.Array]]
PartitionRule = Callable[[Context, JaxprEqn, list[Tile], list[Sharding]], list[Tile]]
Work = Callable[[Mapping[Factor, int]], float]
Linear = Callable[[JaxprEqn], Sequence[Sequence[int]]]


def linear_in(*groups: Sequence[int]) -> Linear:
    """Linear in the operands of each group jointly, while all others are fixed.

    A sum is `linear_in((0, 1))`, a product `linear_in((0,), (1,))`.
    """
    return lambda eqn: groups


def linear_in_all(eqn: JaxprEqn) -> Sequence[Sequence[int]]:
    """Linear in all operands jointly."""
    return (range(len(eqn.invars)),)


def bind_local(
    ctx: Context, eqn: JaxprEqn, tiles: list[Tile], shapes: list[Shape]
) -> Sequence[jax.Array]:
    """The primitive itself, on local arrays."""
    return bind(eqn, [t.array for t in tiles])


@dataclass(frozen=True)
class Doc:
    """An operator's row in docs/reference/operators.md: which dims split how, and what it sends."""

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
    0 before 1. `work` counts the floating-point operations on factors of given local sizes, for
    operators that compute for longer than they read and write memory. `linear` gives the operands
    that the operator is linear in: it can run on unreduced ones, and its result is unreduced then.
    `doc` is the operator's row in docs/reference/operators.md.
    """

    factors: Callable[[JaxprEqn], Factors]
    local: LocalOp = bind_local
    partition: PartitionRule | None = None
    level: int = 1
    work: Work | None = None
    linear: Linear | None = None
    doc: Doc = Doc()


RULES: dict[Primitive, Rule] = {}


def equation_key(eqn: JaxprEqn) -> int | None:
    """Equations with one key are alike but for their variables, as in layer after layer.

    None where that cannot be told, or where the equation holds programs, which are not alike.
    """
    params = tuple(eqn.params.items())
    if any(map(_holds_program, eqn.params.values())):
        return None
    types: list[Any] = []
    for atom in (*eqn.invars, *eqn.outvars):
        aval = atom.aval
        types += (aval.shape, aval.dtype, str(atom.val) if isinstance(atom, Literal) else None)
    if len(_numbers) > MOST_REMEMBERED:
        _numbers.clear()
    try:
        return _numbers.setdefault((eqn.primitive, params, tuple(types)), next(_unused))
    except TypeError:  # a parameter that cannot be hashed
        return None


_numbers: dict[Any, int] = {}  # of kinds of equations
_unused = itertools.count()


def _holds_program(param: Any) -> bool:
    if isinstance(param, tuple):
        return any(map(_holds_program, param))
    return isinstance(param, (Jaxpr, ClosedJaxpr))


_described: dict[Any, Factors] = {}


def factors_of(rule: Rule, eqn: JaxprEqn, key: int | None = None) -> Factors:
    """The factors of an equation; those of equations that are alike are made once."""
    key = equation_key(eqn) if key is None else key
    if key is None:
        return rule.factors(eqn)
    found = _described.get((rule.factors, key))
    if found is None:
        if len(_described) > MOST_REMEMBERED:
            _described.clear()
        found = _described[rule.factors, key] = rule.factors(eqn)
    return found


MOST_REMEMBERED = 16384  # kinds of equations of which something is remembered


def register(rule: Rule, *primitives: Primitive) -> None:
    """Make `rule` the rule of `primitives`; each has exactly one."""
    for primitive in primitives:
        assert primitive not in RULES, primitive
        RULES[primitive] = rule
