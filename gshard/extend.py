"""For extensions: everything needed to write a rule for an operator.

`register_rule` with a string is enough for most primitives (docs/howto/custom-operators.md). A
`Rule` describes an operator in full, as gshard's own rules do: its `Factors` say how the dims of
operands and results correspond, and `local` computes the results of one device from `Tile`s. Where
more is needed, `ways` lists the ways to run the operator, of which the planner takes the cheapest,
and `run` runs that one with what the `Context` offers; `by_factors` lists the ways of factors. The
files in gshard/rules are examples.
"""

import gshard.rules  # noqa: F401  (before a user's, which replace them)
from gshard.graph.reason import Reason
from gshard.rules.base.register import register_rule
from gshard.rules.base.rule import (
    Context,
    Doc,
    Linear,
    LocalOp,
    PartitionRule,
    Rule,
    RunWay,
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
    "Linear",
    "LocalOp",
    "PartitionRule",
    "Place",
    "Reason",
    "Rule",
    "RunWay",
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
