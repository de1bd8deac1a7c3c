"""A plan: what each device computes and sends, before any collective is emitted.

It is a program over local shapes whose communication is nodes (`moving.nodes`): reshards,
reductions, halos and aligned rows, each with its reason and the bytes that it sends. Operators that
communicate by themselves (a sort, a ring, a manual region) already have collectives in it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from gshard.graph.history import program_text
from gshard.graph.source import source_of
from gshard.moving.inventory import Collective, collective_note, collectives_of
from gshard.moving.nodes import node_bytes, node_of
from gshard.rules.base.rule import REGIONS, RULES, Rule


@dataclass(frozen=True)
class Plan:
    """The planned program of one of `num_devices` devices."""

    jaxpr: Jaxpr
    num_devices: int

    @functools.cached_property
    def sends(self) -> list[Collective]:
        """Everything that is sent, in program order: nodes, and collectives inside operators."""
        return collectives_of(self.jaxpr, self.num_devices)

    @property
    def bytes(self) -> int:
        """What one device sends in all."""
        return sum(sent.total_bytes for sent in self.sends)

    def __str__(self) -> str:
        title = f"plan for each of {self.num_devices} devices"
        return program_text(self.jaxpr, title, plan_note)

    __repr__ = __str__


def _rule_of(operator: str) -> str:
    """The file of the rule of an operator, in parentheses."""
    known: dict[Any, Any] = {**RULES, **REGIONS}
    for primitive, rule in known.items():
        if primitive.name == operator:
            own = isinstance(rule, Rule) and (rule.run or rule.ways or rule.factors)
            made = own or rule.partition
            module = getattr(made, "func", made).__module__  # a partial function's is "functools"
            return f" (rule: {module.removeprefix('gshard.').replace('.', '/')}.py)"
    return ""


def plan_note(eqn: JaxprEqn) -> str:
    """Why an equation of a plan is there, and what it sends."""
    if (node := node_of(eqn)) is None:
        return collective_note(eqn)
    why = f"{node.reason}{_rule_of(node.reason.operator)}"
    return f"{source_of(eqn)}: {why}; sends {node_bytes(eqn):,} bytes"
