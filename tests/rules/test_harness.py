"""JAX's own cases for its primitives, sharded at random: the values are `jax.jit`'s."""

import pytest

from tests.rules import harness

SKIPPED: dict[str, str] = {}  # the name of a case, and why it says nothing about gshard

SLOW_TO_COMPILE = ("igamma", "random_gamma", "regularized_incomplete_beta")


def sliced(count: int, per_group: int) -> list[str]:
    """So many of the cases, evenly over all groups."""
    names = [n for n in harness.spread(per_group) if not n.startswith(SLOW_TO_COMPILE)]
    return names[:: max(1, len(names) // count)]


@pytest.mark.parametrize("name", sliced(60, 2))
def test_a_slice_of_the_harness(name):
    harness.run_case(name)


def test_the_harness_has_a_thousand_cases():
    assert len(set(harness.spread(14)) - set(SKIPPED)) >= 1000


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(harness.spread(14)) - set(SKIPPED)))
def test_the_harness(name):
    harness.run_case(name)
