"""What propagation finds is priced by the model, as the solver would."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gshard.autosharding.budget import Clock
from gshard.autosharding.cost import sharding_of, specs_of
from gshard.autosharding.cost.model import ModelBuilder
from gshard.autosharding.cost.strategies import PICO
from gshard.autosharding.evaluate import Deviations, Evaluator, ModelAnswer
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
    """The evaluator of a program, and the answer on a mesh of one axis."""
    subject = TracedProgram.of(fn, args, 8)
    model = ModelBuilder(subject, MESH, H100, limit).built()
    result = solve(model.problem)
    evaluator = Evaluator(subject, H100, limit, {}, Clock(100.0, counted=True))
    peak = float(model.problem.memory.profile(result.answer).max())
    return evaluator, ModelAnswer(result.cost / PICO, model, result.answer, peak)


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
    deviations = Deviations(choice.model, choice.answer)
    problem, nodes = choice.model.problem, choice.model.nodes
    found, fixed = {}, {}
    for var, node in nodes.items():
        specs = specs_of(var.aval.shape, MESH)
        own = int(choice.answer[node])
        number = data.draw(st.sampled_from([own, own, own, *range(len(specs))]))
        found[var], fixed[node] = sharding_of(specs[number], len(var.aval.shape), MESH), number
    priced = deviations.priced(found)
    wanted = with_tensors(problem, fixed) / PICO
    assert {nodes[var] for var in priced.tensors} == {
        node for node, number in fixed.items() if number != choice.answer[node]
    }
    if np.isfinite(wanted):
        assert choice.cost + priced.seconds == pytest.approx(wanted, rel=1e-9)
        assert priced.extra_cost.sum() / PICO == pytest.approx(priced.seconds)


def test_the_answer_itself_costs_nothing_more():
    _, choice = chosen(attend, struct(512, 64), *[struct(64, 64)] * 3)
    found = {var: choice.sharding(var) for var in choice.model.nodes}
    priced = Deviations(choice.model, choice.answer).priced(found)
    assert (priced.seconds, priced.excess_bytes, priced.tensors) == (0.0, 0.0, frozenset())


def test_memory_above_the_limit_is_found_where_it_is_held():
    _, choice = chosen(attend, struct(4096, 64), *[struct(64, 64)] * 3, limit=40 << 20)
    replicated = {
        var: sharding_of((-1,), len(var.aval.shape), MESH)
        for var in choice.model.nodes
        if var.aval.shape == (4096, 4096)
    }
    priced = Deviations(choice.model, choice.answer).priced(replicated)
    assert priced.excess_bytes > 0
    held = {n for n, more in enumerate(priced.extra_cost) if more > 0}
    assert held & {choice.model.nodes[var] for var in replicated}
