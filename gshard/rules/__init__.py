"""The operators, one file per family; importing this package registers them all."""

from collections.abc import Sequence

from jax.extend.core import JaxprEqn

from gshard.rules import (  # noqa: F401  (each file registers its operators)
    callbacks,
    contraction,
    control,
    custom_partitioning,
    dynamic_slice,
    fft,
    grouped,
    grouped_dot,
    indexing,
    layout,
    linalg,
    manual,
    pallas,
    pointwise,
    random,
    reduction,
    ring_pass,
    row_map,
    scatter,
    sort,
    stacks,
    window,
    window_reduce,
)
from gshard.rules.base.rule import REGIONS, RULES, RegionRule, Rule
from gshard.rules.callbacks import unknown_rule
from gshard.rules.manual import CROSSING_MANUAL, IN_REGION
from gshard.tensors.tile import Tile

__all__ = ["REGIONS", "RULES", "RegionRule", "Rule", "rule_of"]


def rule_of(eqn: JaxprEqn, tiles: Sequence[Tile], strict: bool) -> Rule | RegionRule:
    """The rule by which an operator runs on these tiles, or on their sums: every operator has one.

    With `strict`, a primitive for which none is registered is an error.
    """
    if any(t.sharding.manual for t in tiles) and eqn.primitive not in CROSSING_MANUAL:
        return IN_REGION
    known = REGIONS.get(eqn.primitive) or RULES.get(eqn.primitive)
    return known or unknown_rule(eqn, strict)
