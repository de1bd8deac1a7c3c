"""Few annotations: what propagation finds is priced by the model, and departures are annotated."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gshard
from benchmarks.auto_cases import few_tokens, many_tokens
from gshard.autosharding.auto import auto
from gshard.autosharding.budget import Clock
from gshard.autosharding.candidates import Candidates, ModelAnswer
from gshard.autosharding.compact import Compact
from gshard.autosharding.cost.model import build
from gshard.autosharding.cost.specs import sharding_of, specs_of
from gshard.autosharding.cost.strategies import PICO
from gshard.autosharding.departures import Departures
from gshard.autosharding.solver import solve
from gshard.autosharding.solver.presolve import ProblemGraph
from gshard.autosharding.traced import TracedProgram
from gshard.forecast.hardware import hardware

H100 = hardware("h100")
MESH = (8,)


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def attend(x, wq, wk, wo):
    """The rows are split best, and nothing about the weights says so."""
    scores = jax.nn.softmax((x @ wq) @ (x @ wk).T)
    return (scores @ x) @ wo


@functools.cache
def chosen(fn, *args, limit=H100.memory):
    """Candidates of a program, and the answer on a mesh of one axis."""
    subject = TracedProgram.of(fn, args, 8)
    model = build(subject.flat, MESH, H100, limit, subject.returned)
    result = solve(model.problem)
    candidates = Candidates(subject, H100, limit, {}, Clock(100.0, 100.0))
    peak = float(model.problem.memory.profile(result.answer).max())
    return candidates, ModelAnswer(result.cost / PICO, model, result.answer, peak)


def with_tensors(problem, fixed):
    """The least cost where some nodes have the given strategies: the slow oracle."""
    network = ProblemGraph(problem)
    for node, strategy in fixed.items():
        network.keep(node, np.array([strategy]))
    part, _ = network.result()
    return solve(part).cost


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_shardings_are_priced_as_the_solver_does(data):
    _, choice = chosen(attend, struct(512, 64), *[struct(64, 64)] * 3)
    departures = Departures(choice.model, choice.answer)
    problem, nodes = choice.model.problem, choice.model.nodes
    found, fixed = {}, {}
    for var, node in nodes.items():
        specs = specs_of(var.aval.shape, MESH)
        own = int(choice.answer[node])
        number = data.draw(st.sampled_from([own, own, own, *range(len(specs))]))
        found[var], fixed[node] = sharding_of(specs[number], len(var.aval.shape), MESH), number
    priced = departures.priced(found)
    wanted = with_tensors(problem, fixed) / PICO
    assert {nodes[var] for var in priced.tensors} == {
        node for node, number in fixed.items() if number != choice.answer[node]
    }
    if np.isfinite(wanted):
        assert choice.cost + priced.seconds == pytest.approx(wanted, rel=1e-9)
        assert priced.worse.sum() / PICO == pytest.approx(priced.seconds)


def test_the_answer_itself_costs_nothing_more():
    _, choice = chosen(attend, struct(512, 64), *[struct(64, 64)] * 3)
    found = {var: choice.sharding(var) for var in choice.model.nodes}
    priced = Departures(choice.model, choice.answer).priced(found)
    assert (priced.seconds, priced.too_much, priced.tensors) == (0.0, 0.0, ())


def test_memory_above_the_limit_is_found_where_it_is_held():
    _, choice = chosen(attend, struct(4096, 64), *[struct(64, 64)] * 3, limit=40 << 20)
    replicated = {
        var: sharding_of((-1,), len(var.aval.shape), MESH)
        for var in choice.model.nodes
        if var.aval.shape == (4096, 4096)
    }
    priced = Departures(choice.model, choice.answer).priced(replicated)
    assert priced.too_much > 0
    held = {n for n, more in enumerate(priced.worse) if more > 0}
    assert held & {choice.model.nodes[var] for var in replicated}


@pytest.mark.slow
@pytest.mark.parametrize("case", [many_tokens, few_tokens])
def test_a_handful_of_annotations_is_as_good_as_all(case):
    program = case(False)
    candidates, choice = chosen.__wrapped__(program.fn, *program.arguments)
    full = candidates.of_all(choice)
    best = min(Compact(candidates, choice).layouts(6.0), key=lambda layout: layout.seconds)
    assert 0 < len(best.inside) <= 5 < len(full.inside) / 4
    assert best.seconds <= 1.01 * full.seconds
    # Each is needed: without it propagation would depart from the answer.
    for annotation in best.inside:
        assert annotation.saves > 0
    without = dataclasses.replace(best, inside=())
    jitted = gshard.jit(program.fn, devices=8, hardware="h100", annotations=without)
    assert jitted.lower(*program.arguments).forecast().serial_seconds > 1.01 * best.seconds


def test_a_memory_limit_is_kept_with_few_annotations():
    """Propagation alone leaves the scores replicated, which is too much."""
    layout = auto(
        attend,
        struct(8192, 64),
        *[struct(64, 64)] * 3,
        devices=8,
        hardware="h100",
        memory="150 MB",
        seconds=5.0,
    )
    assert layout.memory_bytes <= 150e6
    assert len(layout.inside) <= 2
