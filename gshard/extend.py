"""For extensions: everything needed to write a rule for an operator.

`register_rule` with a string is enough for most primitives (docs/howto/custom-operators.md). A
`Rule` describes an operator in full, as gshard's own rules do: its `Factors` say how the dims of
operands and results correspond, `local` computes the results of one device from `Tile`s, and
`partition` takes over where more is needed, with what the `Context` offers. `ways` lists its
alternatives, of which `cheapest` finds the best; `by_factors` lists those of factors. The files in
gshard/rules are examples.
"""

import gshard.rules  # noqa: F401  (before a user's, which replace them)
from gshard.graph.reason import Reason
from gshard.rules.base.register import register_rule
from gshard.rules.base.rule import (
    Context,
    Doc,
    LocalOp,
    PartitionRule,
    Rule,
    Shares,
    Way,
    Ways,
    Work,
    bind_local,
    cheapest,
)
from gshard.rules.base.ways import by_factors
from gshard.tensors.devices import Place
from gshard.tensors.factors import Dim, Factor, Factors, Shape, no_factors
from gshard.tensors.sharding import Sharding, Split
from gshard.tensors.tile import Tile

__all__ = [
    "Context",
    "Dim",
    "Doc",
    "Factor",
    "Factors",
    "LocalOp",
    "PartitionRule",
    "Place",
    "Reason",
    "Rule",
    "Shape",
    "Sharding",
    "Shares",
    "Split",
    "Tile",
    "Way",
    "Ways",
    "Work",
    "bind_local",
    "by_factors",
    "cheapest",
    "no_factors",
    "register_rule",
]
