"""The operators, one file per family; importing this package registers them all."""

from gshard.rules import (
    contraction,
    control,
    cumulative,
    dynamic,
    formatting,
    indexing,
    joining,
    layout,
    manual,
    order,
    pointwise,
    random,
    reduction,
    scatter,
    window,
    window_reduce,
)
from gshard.rules.registry import RULES, Rule

__all__ = [
    "RULES",
    "Rule",
    "contraction",
    "control",
    "cumulative",
    "dynamic",
    "formatting",
    "indexing",
    "joining",
    "layout",
    "manual",
    "order",
    "pointwise",
    "random",
    "reduction",
    "scatter",
    "window",
    "window_reduce",
]
