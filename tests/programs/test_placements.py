"""Random programs, called again and again with arguments that are placed at random.

A call may repeat any placement of an earlier one, in any order: a program that was made for one of
them must not be used for another that it does not fit, nor JAX's dispatch to it.
"""

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gshard
from tests.oracle import assert_same, placed_anew, random_array
from tests.programs.test_random_programs import program, random_programs

SEEDS = st.integers(0, 99)


@st.composite
def called_programs(draw):
    """A program on some devices, and the placements of the arguments of its calls."""
    devices, shapes, inputs, steps = draw(random_programs())
    seeds = draw(st.lists(SEEDS, min_size=1, max_size=3, unique=True))
    calls = draw(st.lists(st.sampled_from(seeds), min_size=len(seeds), max_size=6))
    return devices, shapes, inputs, steps[:2], [*seeds, *calls]


def check_calls(case, compiled):
    devices, shapes, inputs, steps, calls = case
    args = tuple(random_array(s, seed=i) for i, s in enumerate(shapes))

    def mark(x, assignment):
        return x if assignment is None else gshard.shard(x, assignment)

    wanted = jax.jit(program(steps, inputs, lambda x, _: x))(*args)
    step = gshard.jit(program(steps, inputs, mark), devices=jax.devices()[:devices])
    once = step.lower(*args).compile() if compiled else None
    for seed in calls:
        placed = placed_anew(step, args, seed)
        assert_same(step(*placed), wanted, rtol=2e-4, atol=2e-4)
        if once is not None:
            assert_same(once(*placed), wanted, rtol=2e-4, atol=2e-4)


@settings(max_examples=4)
@given(called_programs(), st.booleans())
def test_programs_called_with_arguments_placed_at_random(case, compiled):
    check_calls(case, compiled)


@pytest.mark.slow
@settings(max_examples=150, derandomize=False)
@given(called_programs(), st.booleans())
def test_many_programs_called_with_arguments_placed_at_random(case, compiled):
    check_calls(case, compiled)
