"""A pass over scores whose keys come round: what is computed for each visiting block of keys.

`rules.visits` runs it. No device ever has more than its own queries' scores for one block of keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Jaxpr, Primitive

from gshard.tensors.sharding import Split

KEYS, QUERIES = "keys", "queries"


@dataclass(frozen=True, eq=False)
class Sum:
    """A result: `eqn` sums the scores that are its operand `number`, over keys or over queries.

    `scores` is their place among the results of the body.
    """

    eqn: Any
    number: int
    over: str
    scores: int


@dataclass(frozen=True, eq=False)
class Softmax:
    """A softmax over keys, in one pass: its maximum, its sum, and weighted sums of values.

    Numbers are those of the sums that it stands for; `weighted` are products of the weights with
    values, before (False) or after the division by the sum. `logits` is the place of the scores
    among the results of the body.
    """

    logits: int
    maximum: int
    total: int
    weighted: tuple[tuple[int, bool], ...]


@dataclass(frozen=True, eq=False)
class BlockMask:
    """A mask of the scores, which `body` makes: where it is not `seen`, logits are `fill`.

    A block that it hides altogether is not computed. In a round that makes the softmax, all of its
    logits are `fill`; in others, what is summed is zero if `exp(fill - shift)` is.
    """

    body: Jaxpr
    seen: bool
    fill: float
    shift: Any | None


@dataclass(frozen=True, eq=False)
class RingPass:
    """One round of the keys: `body` makes scores from the operands, `sums` sum them up.

    `names` are those of the dims of all variables, of which `whole` cannot be split; queries and
    keys are cut by `split`. `hides` is a mask of them, if there is one.
    """

    body: Jaxpr
    sums: tuple[Sum, ...]
    softmax: Softmax | None
    names: Mapping[Any, tuple[str, ...]]
    whole: frozenset[str]
    queries: str
    keys: str
    split: Split
    hides: BlockMask | None


ring_pass_p = Primitive("visits")  # operands: those of the body; results: those of the sums
ring_pass_p.multiple_results = True


@ring_pass_p.def_abstract_eval
def _visits(*operands: Any, visits: RingPass) -> list[Any]:
    return [s.eqn.outvars[0].aval for s in visits.sums]
