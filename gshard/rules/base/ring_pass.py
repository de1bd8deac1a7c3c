"""A ring pass: the scores of a device's queries with each block of keys, as blocks pass around.

The rule of `ring_pass_p` runs it. A device only ever has its own queries' scores for one block of
keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Primitive
from jax.extend.core import primitives as p

from gshard.tensors.sharding import Split

KEYS, QUERIES = "keys", "queries"


@dataclass(frozen=True, eq=False)
class Sum:
    """An equation that sums the scores `eqn.invars[number]` over all keys, or over all queries."""

    eqn: JaxprEqn
    number: int
    over: str

    @property
    def scores(self) -> Any:
        """The scores that it sums."""
        return self.eqn.invars[self.number]

    @property
    def out(self) -> Any:
        """Its result."""
        return self.eqn.outvars[0]

    @property
    def kind(self) -> str:
        """How it combines scores: "sum", "max" or "min"."""
        return {p.reduce_max_p: "max", p.reduce_min_p: "min"}.get(self.eqn.primitive, "sum")

    def summed(self, number: int) -> tuple[int, ...]:
        """The dims of an operand that it sums over."""
        if self.eqn.primitive is p.dot_general_p:
            return tuple(map(int, self.eqn.params["dimension_numbers"][0][number]))
        return tuple(map(int, self.eqn.params["axes"]))


@dataclass(frozen=True, eq=False)
class Softmax:
    """An online softmax over keys: the maximum of logits, and sums of `exp(logits - maximum)`.

    `total` is their own, `weighted` are their products with values.
    """

    maximum: Sum
    total: Sum
    weighted: tuple[Sum, ...]

    @property
    def sums(self) -> tuple[Sum, ...]:
        """All sums that it replaces."""
        return (self.maximum, self.total, *self.weighted)


@dataclass(frozen=True, eq=False)
class BlockMask:
    """A mask of the scores, computed by `body`: where it is not `seen`, logits are `fill`.

    A block that is masked entirely is skipped. In a pass that computes the softmax, all of its
    logits are `fill`; in others, its sums are zero if `exp(fill - shift)` is.
    """

    body: Jaxpr
    seen: bool
    fill: float
    shift: Any | None


@dataclass(frozen=True, eq=False)
class RingPass:
    """One pass of the keys around the ring: `sums` reduce the scores that the body computes.

    `names` are those of the dims of all variables, of which `whole` cannot be split; queries and
    keys are split by `split`. `mask` is their mask, if there is one.
    """

    sums: tuple[Sum, ...]
    softmax: Softmax | None
    names: Mapping[Any, tuple[str, ...]]
    whole: frozenset[str]
    queries: str
    keys: str
    split: Split
    mask: BlockMask | None

    def __str__(self) -> str:
        kinds = "".join(f", {name}" for name in ("softmax", "mask") if getattr(self, name))
        return f"over {self.split.tiles} devices{kinds}"


ring_pass_p = Primitive("ring_pass")  # operands: those of the body; results: those of the sums
ring_pass_p.multiple_results = True


@ring_pass_p.def_abstract_eval
def _types(*operands: Any, body: Jaxpr, ring: RingPass) -> list[Any]:
    return [s.out.aval for s in ring.sums]
