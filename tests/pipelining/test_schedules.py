"""Schedules are tables that can be checked: dependencies, bubbles, memory, text."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gshard.pipelining.schedules import NAMES, B, F, W, check, forward_only, make, parse

SIZES = st.tuples(st.integers(1, 9), st.integers(1, 24))
OWN = """
F0 F1 .  B0 W0 B1 W1
.  F0 B0 F1 B1 W0 W1
"""


def idle_ticks(name, stages):
    """The formulas: a backward pass that waits for all of the one before it, or for a part."""
    return (stages - 1) * (1 if name.startswith("zb") else 3)


@given(st.sampled_from(NAMES), SIZES, st.integers(2, 4))
def test_a_schedule_does_all_work_with_the_bubble_of_its_formula(name, size, chunks):
    stages, rounds = size
    microbatches = stages * -(-rounds // stages)  # from as many microbatches as stages on
    schedule = check(make(name, stages, microbatches, chunks))
    works = {(op, n, m) for op in (F, B, W) for n in range(len(schedule.positions))
             for m in range(microbatches)}  # fmt: skip
    assert set(schedule.when) == works
    idle = schedule.ticks - 3 * microbatches * schedule.chunks
    assert idle == idle_ticks(name, stages)
    assert schedule.bubble == pytest.approx(idle / schedule.ticks)


@given(st.sampled_from([n for n in NAMES if n != "interleaved"]), SIZES)
def test_memory_does_not_grow_with_the_microbatches(name, size):
    stages, more = size
    in_flight = [make(name, stages, m).in_flight for m in (2 * stages, 2 * stages + more)]
    if name == "gpipe":
        assert in_flight == [2 * stages, 2 * stages + more]
    else:
        assert in_flight == [stages * (2 if name == "zbv" else 1)] * 2


@given(st.sampled_from(NAMES), SIZES)
def test_the_text_of_a_schedule_is_the_schedule(name, size):
    stages, rounds = size
    schedule = make(name, stages, stages * -(-rounds // stages))
    again = parse(schedule.text, schedule.vee)
    np.testing.assert_array_equal(again.table, schedule.table)
    assert str(schedule).startswith(f"{name}: {stages} stages")


@given(st.sampled_from(NAMES), SIZES)
def test_forward_passes_alone_take_no_longer_than_they_must(name, size):
    stages, rounds = size
    schedule = make(name, stages, stages * -(-rounds // stages))
    alone = forward_only(schedule)
    filling = (stages - 1) * (2 if schedule.vee else 1)  # down to the last stage, and up again
    assert alone.ticks <= schedule.microbatches * schedule.chunks + filling


def test_the_bubbles_that_others_publish():
    found = {name: make(name, 8, 16) for name in ("1f1b", "zb-h1")}
    assert found["1f1b"].bubble == pytest.approx(0.304, abs=5e-4)
    assert found["zb-h1"].bubble <= 0.1273
    assert make("interleaved", 8, 16, 4).bubble == pytest.approx(7 / 71)


def test_a_table_of_ones_own():
    schedule = parse(OWN)
    assert (schedule.stages, schedule.microbatches, schedule.ticks) == (2, 2, 7)
    assert schedule.in_flight == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (OWN.replace("F1 .  B0", "F1 B0 . "), "B0 of stage 0 in tick 2, before it can: B0 of"),
        (OWN.replace("W1", ". "), "never does W1 of stage 0"),
        (OWN.replace("F0 F1 .", "F0 F1 F1"), "the same work twice"),
        (OWN.replace("F0 F1 .", "F0 F1 X"), "'X'; allowed are '.', and F, B or W"),
    ],
)
def test_a_wrong_table_is_an_error_that_says_where(text, said):
    with pytest.raises(ValueError, match=said):
        parse(text)


def test_names_and_sizes_that_there_are_not():
    with pytest.raises(ValueError, match="allowed are 'gpipe', '1f1b'"):
        make("dualpipe", 2, 4)
    with pytest.raises(ValueError, match="5 microbatches do not divide by 2 stages"):
        make("interleaved", 2, 5)
