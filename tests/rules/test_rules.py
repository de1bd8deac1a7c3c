"""Every primitive that JAX exports has a rule, and docs/reference/operators.md says what it is."""

from pathlib import Path

import pytest

from gshard.graph import CALLS
from gshard.rules import RULES
from gshard.rules.__main__ import REFS, exported_primitives, table

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "operators.md"


@pytest.mark.parametrize("name", exported_primitives())
def test_every_exported_primitive_has_a_rule(name):
    """A release of JAX that adds a primitive fails here, by its name."""
    primitive = exported_primitives()[name]
    assert (primitive in RULES) or (primitive in CALLS) or (primitive in REFS)


def test_every_rule_says_how_dims_split():
    silent = [
        p.name
        for p, rule in RULES.items()
        if not (rule.doc.free or rule.doc.halo or rule.doc.gather or rule.doc.refused)
    ]
    assert not silent


def test_the_page_is_up_to_date():
    """Rows of primitives that this release of JAX does not have are not its business."""
    stated = {row for row in PAGE.read_text().splitlines() if row.startswith("| ")}
    missing = [row for row in table().splitlines() if row.startswith("| ") and row not in stated]
    assert not missing, "run python -m gshard.rules --update"
