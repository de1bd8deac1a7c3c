"""`layout.bound` is below the forecast of every layout; the layout found is the best there is."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gshard
from benchmarks import auto_cases
from gshard.autosharding.auto import _Chooser
from gshard.autosharding.budget import Clock
from gshard.autosharding.cost import distinct_meshes, sharding_of, specs_of
from gshard.autosharding.evaluate import Evaluator
from gshard.autosharding.layout.annotations import Annotated, AnnotatedInside, dims_of
from gshard.autosharding.traced import TracedProgram
from gshard.forecast.hardware import hardware

MACHINE = hardware("h100")


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def evaluator_of(fn, args, devices, machine=MACHINE, seconds=60.0, **keywords):
    """What lowers layouts of a program, with so many seconds of work."""
    subject = TracedProgram.of(fn, args, devices)
    return Evaluator(subject, machine, machine.memory, keywords, Clock(seconds, counted=True))


def bound_of(fn, args, devices=8, seconds=60.0, meshes=None, machine=MACHINE, **keywords):
    """The bound over some meshes, or all, each solved for its part of these seconds of work."""
    evaluator = evaluator_of(fn, args, devices, machine, seconds, **keywords)
    chooser = _Chooser(evaluator, looked_at=tuple(meshes or distinct_meshes(machine, devices)))
    return chooser._bound(evaluator.clock)


STEPS = {
    "relu": lambda x, w: jax.nn.relu(x) @ w,
    "normalized": lambda x, w: (x / (1.0 + jnp.sum(x**2, -1, keepdims=True))) @ w,
    "softmax": lambda x, w: jax.nn.softmax(x @ w),
    "residual": lambda x, w: x + jnp.tanh(x @ w @ w.T),
    "centred": lambda x, w: (x - jnp.mean(x, 0)) @ w,
}


MORE_STEPS = STEPS | {
    "embedded": lambda x, w: jnp.take(w, x[:, :3].astype(jnp.int32) % w.shape[0], axis=0).sum(1),
    "cumulative": lambda x, w: jnp.cumsum(x @ w, 0),
    "sorted": lambda x, w: jnp.sort(x, -1) @ w,
    "scan": lambda x, w: jax.lax.scan(lambda c, r: (c / 2 + r, c), w[0], x @ w)[1],
    "transposed": lambda x, w: (w.T @ x.T).T * jnp.sum(w),
    "shifted": lambda x, w: jnp.pad((x @ w)[1:], ((1, 0), (0, 0))),
    "twice": lambda x, w: jnp.exp(-x) @ w + jnp.sin(jnp.exp(-x)) @ w,
    "masked": lambda x, w: (
        jnp.where(jax.random.bernoulli(jax.random.key(0), 0.9, x.shape), x, 0) @ w
    ),
}


@st.composite
def programs(draw, steps=STEPS):
    """Two operators on a matrix, forwards or with the gradient for their weights."""
    names = [draw(st.sampled_from(sorted(steps))) for _ in range(2)]
    rows = draw(st.sampled_from([6, 512, 16_384]))
    sizes = [draw(st.sampled_from([64, 96, 1024])) for _ in range(3)]
    shapes = [(rows, sizes[0]), (sizes[0], sizes[1])]
    width = sizes[0] if names[0] == "residual" else sizes[1]
    shapes.append((width, sizes[2]))

    def forward(x, first, second):
        return steps[names[1]](steps[names[0]](x, first), second)

    def gradient(x, first, second):
        return jax.grad(lambda w: jnp.sum(forward(x, *w) ** 2))((first, second))

    fn = gradient if draw(st.booleans()) else forward
    return f"{names} {shapes}", fn, tuple(struct(*s) for s in shapes)


def _all_shardings(args, devices):
    """Every combination of shardings of the arguments over every mesh, but for the names of axes:
    on 2 x 2 the axes of a layout can be swapped."""
    seen = set()
    for mesh in distinct_meshes(MACHINE, devices):
        for specs in itertools.product(*(specs_of(a.shape, mesh) for a in args)):
            swapped = tuple(spec[::-1] for spec in specs)
            if len(set(mesh)) == 1 and swapped in seen:
                continue
            seen.add(specs)
            yield tuple(sharding_of(s, 2, mesh) if any(d >= 0 for d in s) else None for s in specs)


def _check(program, devices):
    """Every layout of the arguments, lowered: none below the bound, none 1% better."""
    name, fn, args = program
    layout = gshard.auto(fn, *args, devices=devices, hardware="h100")
    best = jnp.inf
    for shardings in _all_shardings(args, devices):
        jitted = gshard.jit(fn, in_shardings=shardings, devices=devices, hardware="h100")
        found = jitted.lower(*args).forecast()
        best = min(best, found.serial_seconds)
    assert layout.bound <= best, name
    assert layout.bound <= layout.seconds, name
    assert layout.seconds <= 1.01 * best, name


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(programs(), st.sampled_from([2, 3, 4]))
def test_the_best_of_all_layouts_of_many_programs(program, devices):
    _check(program, devices)


@pytest.mark.slow
@settings(max_examples=2, deadline=None)
@given(programs(), st.sampled_from([2, 3]))
def test_the_best_of_all_layouts_of_a_few_programs(program, devices):
    _check(program, devices)


def _layout(data, evaluator, devices):
    """Any layout: arguments and up to three tensors inside are annotated, or none."""
    mesh = data.draw(st.sampled_from(distinct_meshes(evaluator.machine, devices)))

    def dims(shape):
        return dims_of(data.draw(st.sampled_from(specs_of(shape, mesh))), len(shape))

    arguments = tuple(Annotated(path, s, dims(s)) for path, s in evaluator.subject.paths)
    made = sorted({place for place, _ in evaluator.places.values() if place.shape}, key=str)
    chosen = data.draw(st.lists(st.sampled_from(made), max_size=3, unique=True))
    inside = tuple(AnnotatedInside(place, None, dims(place.shape)) for place in chosen)
    return evaluator.evaluate(mesh, arguments, inside)


def _check_layouts(program, name, devices, data, count, **keywords):
    """The bound is not above the forecast of any of so many layouts."""
    _, fn, args = program
    machine = hardware(name)
    bound = bound_of(fn, args, devices, machine=machine, **keywords)
    evaluator = evaluator_of(fn, args, devices, machine, **keywords)
    for _ in range(count):
        layout = _layout(data, evaluator, devices)
        assert bound <= layout.seconds * (1 + 1e-9), (program[0], name, str(layout))


MACHINES = st.sampled_from(["h100", "tpu-v4", "tpu-v5e", "cpu"])


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(programs(MORE_STEPS), MACHINES, st.sampled_from([2, 3, 4, 6, 8]), st.data())
def test_no_layout_is_below_the_bound(program, name, devices, data):
    _check_layouts(program, name, devices, data, 6)


@settings(max_examples=2, deadline=None)
@given(programs(MORE_STEPS), MACHINES, st.sampled_from([2, 3]), st.data())
def test_no_layout_of_a_few_programs_is_below_the_bound(program, name, devices, data):
    _check_layouts(program, name, devices, data, 1)


def test_equal_products_count_once_on_cpus():
    """The gradients of both products need the same third one, which XLA for CPUs computes once."""

    def fn(x, w):
        return jax.grad(lambda x: jnp.sum((jnp.exp(x) @ w + jnp.sin(x) @ w) ** 2))(x)

    args, machine = (struct(512, 64), struct(64, 64)), hardware("cpu")
    jitted = gshard.jit(lambda x, w: fn(gshard.split(x, 0, 2), w), devices=2, hardware=machine)
    assert bound_of(fn, args, 2, machine=machine) <= jitted.lower(*args).forecast().serial_seconds


@pytest.mark.parametrize("devices", [2, 3])
def test_a_bound_that_the_best_layout_meets(devices):
    """Nothing is sent and all work is split: the bound is the forecast, and not above it."""

    def fn(x, first, second):
        return STEPS["relu"](STEPS["residual"](x, first), second)

    _check(("met", fn, (struct(16_384, 64), struct(64, 1024), struct(64, 64))), devices)


@pytest.mark.slow
def test_the_best_layout_may_be_that_of_one_argument():
    """What the model annotates inside is no good start: there it takes all rows to be uneven."""

    def fn(x, first, second):
        return STEPS["centred"](STEPS["residual"](x, first), second)

    _check(("alone", fn, (struct(16_384, 96), struct(96, 64), struct(96, 64))), 3)


@pytest.mark.slow
def test_each_of_two_arguments_of_one_shape_is_tried():
    """The best layout splits the second one alone."""

    def fn(x, first, second):
        return STEPS["normalized"](STEPS["normalized"](x, first), second)

    _check(("alike", fn, (struct(6, 64), struct(64, 64), struct(64, 64))), 2)


@pytest.mark.parametrize("make", [auto_cases.mlp, auto_cases.dlrm])
def test_no_expert_is_below_the_bound(make):
    _check_experts(make(False))


@pytest.mark.slow
@pytest.mark.parametrize("make", auto_cases.CASES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("small", [True, False])
def test_no_expert_of_the_table_is_below_the_bound(make, small):
    if make is auto_cases.haiku:
        pytest.importorskip("haiku")
    _check_experts(make(small))


def _check_experts(case):
    """A program of the table (`python -m benchmarks.auto`), annotated by hand."""
    bound = bound_of(case.fn, case.arguments)
    assert bound > 0
    for name, expert in case.experts.items():
        lowered = gshard.jit(expert, devices=8, hardware="h100").lower(*case.arguments)
        assert bound <= lowered.forecast().serial_seconds, name
