"""Schedules and layers by position are chosen by the forecast of a layer's passes."""

import itertools
import math

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gshard
from gshard.forecast import hardware
from gshard.pipelining.choice import Costs, balanced, chosen
from gshard.pipelining.meaning import Pipe
from gshard.pipelining.schedules import IDLE, NAMES, B, F, W, make, route
from tests.pipelining.programs import dense, make_dense, piped

UNIT = {"message": 1, "saved": 8, "kept": 4, "weights": 2, "rate": math.inf}


def costs(forward=1.0, backward=1.0, late=1.0, head=0.0, **more):
    both = backward + late
    return Costs((0.0, forward, backward, late, head, both), **{**UNIT, **more})


def in_python(schedule, layers, costs):
    """The time of a step: B and W apart, or where W follows B at once in halves, if faster."""
    options = [(), schedule.joined] if min(layers) > 1 else [()]
    return min(cell_by_cell(schedule, layers, costs, joined) for joined in options)


def cell_by_cell(schedule, layers, costs, joined):
    """The clocks of two stages, which wait for each other where one has a message for the other."""
    clocks, positions = [0.0, 0.0], schedule.positions
    for row in schedule.table.tolist():
        waits = False
        for stage, (op, chunk, m) in enumerate(row):
            if op == IDLE:
                continue
            position = positions.index((stage, chunk))
            halves = (position, m) in joined
            is_scored = op == F and position == len(layers) - 1
            spent = layers[position] * costs.seconds[op] + is_scored * costs.seconds[4]
            if halves and op in (B, W):
                lower = layers[position] // 2
                spent = (lower if op == W else layers[position] - lower) * costs.seconds[5]
            clocks[stage] += spent
            to = position + {F: 1, W if halves else B: -1}.get(op, 0)
            waits |= 0 <= to < len(positions) and positions[to][0] != stage
        clocks = [max(clocks)] * 2 if waits else clocks
    return max(clocks)


NUMBERS = st.floats(0.25, 4)


@given(st.sampled_from(NAMES), NUMBERS, NUMBERS, NUMBERS, st.floats(0, 6), st.integers(1, 3))
def test_a_step_waits_where_stages_exchange_messages(name, f, b, w, head, rounds):
    schedule, own = make(name, 2, 2 * rounds), costs(f, b, w, head)
    layers = tuple(rounds + n % 2 for n in range(len(schedule.positions)))
    found = own.step_seconds(Pipe(schedule, layers, own.seconds))
    assert found == pytest.approx(in_python(schedule, layers, own))
    more = make(name, 4, 4 * rounds)
    routes = route(more, tuple(1 + n % 2 for n in range(len(more.positions))), own.seconds)
    work, in_step = routes.spent.sum(0).max(), routes.spent.max(1).sum()
    assert work <= routes.step_seconds * (1 + 1e-9)
    assert routes.step_seconds <= in_step * (1 + 1e-9)


@given(st.sampled_from(("1f1b", "zb-h1")), st.integers(2, 3), st.integers(0, 4), st.floats(0, 6))
def test_layers_are_balanced_as_well_as_they_can_be(name, stages, more, head):
    schedule, own, layers = make(name, stages, 4), costs(head=head), stages + more
    found = balanced(layers, schedule, own)
    every = itertools.product(range(1, layers), repeat=stages)
    others = (Pipe(schedule, c, own.seconds) for c in every if sum(c) == layers)
    assert sum(found.layers) == layers
    assert own.step_seconds(found) <= 1.1 * min(map(own.step_seconds, others))
    if layers % stages == 0 and head == 0:
        assert len(set(found.layers)) == 1


@given(NUMBERS, NUMBERS, NUMBERS, st.sampled_from((4, 8)), st.sampled_from((0.5, 1, 2, math.inf)))
def test_auto_is_the_fastest_within_the_memory(f, b, w, microbatches, share):
    own = costs(f, b, w, rate=50.0)
    made = [make(name, 4, microbatches) for name in NAMES]
    options = [balanced(8, each, own) for each in made]
    needed = [own.memory(option) for option in options]
    limit = share * sorted(needed)[len(needed) // 2]
    found = chosen(None, 4, microbatches, 8, own, limit)
    if min(needed) > limit:
        assert own.memory(found) == min(needed)
    else:
        fits = [o for o, n in zip(options, needed, strict=True) if n <= limit]
        assert own.memory(found) <= limit
        assert own.step_seconds(found) == min(map(own.step_seconds, fits))


def test_what_is_chosen_when():
    """Without a limit the least bubble; 1F1B keeps least; weights that are dear to move stay."""
    dear = costs(rate=0.5, weights=100)
    cases = ((8, costs(), math.inf), (8, dear, math.inf), (4, costs(), 0))
    found = [chosen(None, 4, 8, *case).schedule.schedule for case in cases]
    assert found == ["zbv", "zb-h1", "1f1b"]


def test_a_schedule_that_cannot_fit_is_refused_where_another_fits():
    arguments = make_dense(layers=2, width=64, batch=512)
    small = hardware("h100").replace(memory=450_000)

    def lowered(**settings):
        loss = piped(dense, stages=2, microbatches=16, **settings)
        return gshard.jit(jax.grad(loss), devices=2, hardware=small).lower(*arguments)

    with pytest.raises(ValueError, match=r"'gpipe' has 16 microbatches in flight, which take at "
                       r"least .* of a device's 450 KB; '1f1b' takes") as error:  # fmt: skip
        lowered(schedule="gpipe")
    assert "\n" not in str(error.value).split("\n---")[0]
    assert lowered().pipelines[0].schedule == "1f1b"


def test_stages_are_as_many_as_the_memory_needs():
    """Data parallelism where weights and residuals fit, stages where they do not."""
    arguments = jax.eval_shape(lambda: make_dense(layers=8, width=512, batch=4096))
    step = jax.value_and_grad(piped(dense, stages="auto", microbatches=8))
    found = []
    for memory in (2**37, 75e6):  # 67 MB are weights and their gradients
        machine = hardware("h100").replace(memory=int(memory))
        lowered = gshard.jit(step, devices=4, hardware=machine).lower(*arguments)
        found.append(lowered.pipelines[0].stages)
    assert found == [1, 2]


def test_microbatches_are_as_many_as_are_fastest_within_the_memory():
    """By the forecast of the programs that are lowered with other numbers; more where less fits."""
    arguments = jax.eval_shape(lambda: make_dense(layers=4, width=256, batch=1024))

    def lowered(microbatches, memory=2**37):
        step = jax.value_and_grad(piped(dense, stages=4, microbatches=microbatches))
        machine = hardware("h100").replace(memory=int(memory))
        return gshard.jit(step, devices=4, hardware=machine).lower(*arguments)

    found = lowered("auto")
    best = found.pipelines[0].microbatches
    times = [each.forecast().step_seconds for each in (found, *map(lowered, (1, best // 2, 32)))]
    assert 1 < best < 32
    assert times[0] <= 1.02 * min(times), times
    assert lowered("auto", 4e6).pipelines[0].microbatches > best


@pytest.mark.slow
def test_auto_finds_the_stages_of_a_deep_model_that_fits_no_other_way(tmp_path):
    """Every stage has its weights on all of its devices: 1 or 2 stages do not fit."""

    def block(w, x):
        return dense(jax.tree.map(gshard.replicate, w), x)

    def searched(stages, seconds):
        step = jax.value_and_grad(piped(block, stages=stages, microbatches=8))
        how = {"devices": 4, "hardware": "h100", "memory": "700 KB", "seconds": seconds}
        return gshard.auto(step, *shapes, **how), step

    shapes = jax.eval_shape(lambda: make_dense(layers=8, width=64, batch=32))
    for stages in (1, 2):
        with pytest.raises(ValueError, match="no layout was found that holds at most 700 KB"):
            searched(stages, 2)
    found, step = searched("auto", 6)
    assert (found.stages, found.lowered.pipelines[0].stages) == (4, 4)
    assert found.memory_bytes <= 700e3
    assert 0 < found.bound <= found.seconds
    assert "4 stages" in str(found)
    assert f"gap {100 * found.gap:.1f}%" in str(found)
    found.save(tmp_path / "layout.json")  # what is loaded is traced in as many stages
    loaded = gshard.Layout.load(tmp_path / "layout.json")
    lowered = gshard.jit(step, annotations=loaded, devices=4).lower(*shapes)
    assert lowered.pipelines[0].stages == 4


def test_auto_needs_no_number_of_stages():
    with pytest.raises(ValueError, match="stages='auto' with schedule='1f1b': allowed are a numb"):
        piped(dense, stages="auto", microbatches=2, schedule="1f1b")(*make_dense(4, batch=4))


assert (F, B, W) == (1, 2, 3)  # the order of `Costs.seconds`
