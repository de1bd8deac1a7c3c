"""Memory over time: both ends of a reshard count, and no layout exceeds its limit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard.autosharding.annotate import AnnotationSearch
from gshard.autosharding.auto import _Chooser
from gshard.autosharding.budget import Clock
from gshard.autosharding.cost import NONE, specs_of
from gshard.autosharding.cost.model import MOST_SPECS, ModelBuilder, SharedCopy, _pairs
from gshard.autosharding.evaluate import Evaluator, ModelAnswer
from gshard.autosharding.solver import solve
from gshard.autosharding.solver.problem import FORBIDDEN
from gshard.autosharding.traced import TracedProgram
from gshard.forecast.hardware import hardware

MACHINE = hardware("h100")
MB = 10**6


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def gradients(weights, x):
    def loss(weights):
        y = x
        for weight in weights:
            y = jnp.tanh(y @ weight)
        return jnp.sum(y**2)

    return tuple(jax.grad(loss)(weights))  # no list like the weights, which would be their state


def step(weights, x):
    return [w - 0.1 * g for w, g in zip(weights, gradients(weights, x), strict=True)]


ARGUMENTS = [struct(4096, 4096)] * 6, struct(8192, 4096)


def _layout(subject, limit, copies):
    """The best answer of the model on 8 devices in a row, with copies counted or not."""
    model = ModelBuilder(subject, (8,), MACHINE, limit).built()
    answer = solve(model.problem).answer
    if copies:
        assert model.uncounted(answer)
        model = ModelBuilder(subject, (8,), MACHINE, limit, paired=set(model.copies)).built()
        answer = solve(model.problem).answer
        assert not model.uncounted(answer)
    peak = model.problem.memory.profile(answer).max()
    assert peak <= limit
    evaluator = Evaluator(subject, MACHINE, int(limit), {}, Clock(600.0))
    return AnnotationSearch(evaluator, ModelAnswer(0.0, model, answer, peak)).everything(), peak


def test_gathered_copies_count():
    """Weights that are split and gathered for both passes are held twice in between."""
    limit = 600 * MB
    subject = TracedProgram.of(gradients, ARGUMENTS, 8)
    ignoring, _ = _layout(subject, limit, copies=False)
    assert ignoring.memory_bytes > limit
    counting, peak = _layout(subject, limit, copies=True)
    assert counting.memory_bytes <= limit
    assert counting.memory_bytes == pytest.approx(peak, rel=1e-3)


def test_partial_sums_count():
    """A product over a split dim makes all of its result on every device before it is summed."""

    def product(x, w):
        return x @ w

    arguments = struct(4096, 65_536), struct(65_536, 4096)
    subject = TracedProgram.of(product, arguments, 8)
    least = 4096 * 65_536 * 4 * 2 / 8 + 4096 * 4096 * 4 / 8  # all split over the long dim
    partial = 4096 * 4096 * 4 * MACHINE.efficiency.slack
    model = ModelBuilder(subject, (8,), MACHINE, 1.01 * (least + partial)).built()
    inner = solve(model.problem)
    given = subject.flat.jaxpr.invars
    taken = [specs_of(v.aval.shape, (8,))[inner.answer[model.nodes[v]]] for v in given]
    assert taken == [(1,), (0,)]
    tight = solve(ModelBuilder(subject, (8,), MACHINE, least + 0.9 * partial).built().problem)
    assert tight.cost > inner.cost


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "seconds"), [(700 * MB, 6.0), (480 * MB, 60.0), (550 * MB, 60.0)]
)
def test_no_layout_exceeds_its_limit(limit, seconds):
    layout = gshard.auto(
        gradients, *ARGUMENTS, devices=8, hardware="h100", memory=limit, seconds=seconds
    )
    assert layout.memory_bytes <= limit
    assert layout.memory_bytes == layout.lowered.forecast("h100").memory_bytes


@pytest.mark.slow
@pytest.mark.parametrize("limit", [550 * MB, 480 * MB])
def test_the_model_is_asked_for_less_until_the_program_fits(limit, monkeypatch):
    """Over one axis, where planned programs gather weights that the model keeps split: there is no
    other mesh to turn to. Equal inputs have equal layouts."""
    monkeypatch.setattr(_Chooser, "_meshes", lambda self: [(8,)])
    found = [
        gshard.auto(gradients, *ARGUMENTS, devices=8, hardware="h100", memory=limit, seconds=20.0)
        for _ in range(2)
    ]
    assert all(layout.memory_bytes <= limit for layout in found)
    assert found[0].annotations == found[1].annotations
    assert found[0].inside == found[1].inside


@pytest.mark.parametrize("donated", [False, True])
def test_states_count_as_they_are_returned(donated):
    """At the end of a step arguments and results are held, the weights as in the next step."""
    subject = TracedProgram.of(step, ARGUMENTS, 8)
    jaxpr = subject.flat.jaxpr
    model = ModelBuilder(subject, (8,), MACHINE, 600 * MB, donated=donated).built()
    answer = solve(model.problem).answer
    for var in jaxpr.invars:  # whatever the update of a weight is sharded like
        answer[model.nodes[var]] = specs_of(var.aval.shape, (8,)).index((NONE,))
    for var in jaxpr.outvars:
        answer[model.nodes[var]] = specs_of(var.aval.shape, (8,)).index((0,))
    weights, rows = 6 * 4 * 4096**2, 4 * 8192 * 4096
    held = weights + rows if donated else 2 * weights + rows
    assert model.problem.memory.profile(answer)[-1] == pytest.approx(held, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [450 * MB, 600 * MB])
def test_no_state_exceeds_its_limit(limit):
    """Lowered programs hold more than the model counts: it is asked for less, mesh by mesh."""
    layout = gshard.auto(step, *ARGUMENTS, devices=8, hardware="h100", memory=limit, seconds=20)
    assert layout.memory_bytes == layout.lowered.forecast("h100").memory_bytes <= limit


def test_a_copy_that_is_the_tensor_itself_takes_nothing():
    copy = SharedCopy(np.array([0, 0, 1]), np.array([0, 1, 1]), True, node=0, first=3)
    assert copy.held(np.array([8.0, 2.0])).tolist() == [0, 2, 0]


def test_operators_read_a_copy_that_is_counted_as_it_is():
    """Where strategies are pairs, a reshard after the copy would be counted nowhere."""
    own, read = np.array([0, 0, 1]), np.array([0, 1, 1])
    by_spec = np.array([[0.0, 5.0], [4.0, 0.0]])
    counted = SharedCopy(own, read, True, node=0, first=0).table(by_spec)
    assert counted.tolist() == [[0, FORBIDDEN, FORBIDDEN], [FORBIDDEN, 0, 0]]
    assert SharedCopy(own, read, False, node=0, first=0).table(by_spec).tolist() == [
        [0, 5, 5],
        [4, 0, 0],
    ]


def test_of_many_specs_a_copy_is_the_tensor_or_gathered_from_it():
    few, mesh = specs_of((8, 8), (2,)), (2,)
    own, read = _pairs((8, 8), mesh)
    assert len(own) == len(few) ** 2
    mesh = (2, 2, 2)
    many = specs_of((8, 8, 8), mesh)
    assert len(many) > MOST_SPECS
    own, read = _pairs((8, 8, 8), mesh)
    assert {(a, a) for a in range(len(many))} <= set(zip(own.tolist(), read.tolist(), strict=True))
    for a, b in zip(own, read, strict=True):
        assert all(y in (x, NONE) for x, y in zip(many[a], many[b], strict=True))
