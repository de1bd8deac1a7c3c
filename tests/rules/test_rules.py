"""Every primitive of JAX has a rule or a reason; docs/reference/operators.md has the rules."""

import importlib
import pkgutil
import re
from pathlib import Path

import pytest
from jax.extend.core import Primitive

from gshard._jax import shard_map_p
from gshard.graph import CALLS
from gshard.rules import REGIONS, RULES
from gshard.rules.__main__ import REFS, exported_primitives, table
from gshard.tensors.manual import MANUAL

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "operators.md"


# Bound inside `jax.shard_map` alone: types `unreduced` and `reduced`, and asynchronous collectives.
_OF_NAMED_AXES = r"(vary_)?unreduced_|(psend|precv|preduced|pbroadcast_dynamic)$"
_OF_NAMED_AXES += r"|.*_(start|done|reduced)$"

# Primitives that may be without a rule, and what happens to them.
WITHOUT_RULES = {
    "dce_sink": "has no result; it runs on the first device",
    "empty": "has no operand: each device makes it, and nothing is sent",
    "eval_jaxpr": "JAX 0.10 traces it as a closed call, which newer releases call by this name",
    "from_edtype": "no function of jax.lax binds it",
    "program_order": "no function of jax.lax binds it",
    "scaled_dot": "runs on replicated operands, which the collectives list",
    "tie": "no function of jax.lax binds it",
    "to_edtype": "no function of jax.lax binds it",
}


def primitives():
    """The primitives that JAX exports and those that the modules of `jax.lax` define, by name."""
    package = importlib.import_module("jax._src.lax")
    names = (m.name for m in pkgutil.walk_packages(package.__path__, f"{package.__name__}."))
    members = (v for name in names for v in vars(importlib.import_module(name)).values())
    found = {v for v in members if isinstance(v, Primitive)}
    return sorted({*found, *exported_primitives().values()}, key=lambda p: p.name)


@pytest.mark.parametrize("primitive", primitives(), ids=lambda p: p.name)
def test_every_primitive_has_a_rule(primitive):
    """A release of JAX that adds a primitive fails here, by its name."""
    known = {*RULES, *REGIONS, *CALLS, *REFS, *MANUAL, shard_map_p}
    exempt = primitive.name in WITHOUT_RULES or re.match(_OF_NAMED_AXES, primitive.name)
    assert primitive in known or exempt


def test_every_rule_says_how_dims_split():
    silent = [
        p.name
        for p, rule in {**RULES, **REGIONS}.items()
        if not (rule.doc.free or rule.doc.halo or rule.doc.gather or rule.doc.refused)
    ]
    assert not silent


def test_the_page_is_up_to_date():
    """Rows of primitives that this release of JAX does not have are not its business."""
    stated = {row for row in PAGE.read_text().splitlines() if row.startswith("| ")}
    missing = [row for row in table().splitlines() if row.startswith("| ") and row not in stated]
    assert not missing, "run python -m gshard.rules --update"
