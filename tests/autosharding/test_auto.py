"""`gshard.auto`: known answers, values, memory, errors."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gshard
from gshard.autosharding.auto import _Chooser
from gshard.autosharding.budget import bytes_of
from gshard.autosharding.cost import mesh_shapes, sharding_of, specs_of
from gshard.autosharding.cost.model import ModelBuilder
from gshard.autosharding.layout.annotations import AnnotatedInside
from gshard.autosharding.traced import TracedProgram
from gshard.capture.inside import places
from gshard.forecast.hardware import hardware
from tests.oracle import random_array


def _loss(weights, x, y):
    hidden = jnp.maximum(x @ weights["in"], 0)
    return jnp.mean((hidden @ weights["out"] - y) ** 2)


def step(weights, x, y):
    gradient = jax.grad(_loss)(weights, x, y)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient)


def arguments(batch, features=256, hidden=1024):
    def struct(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    weights = {"in": struct(features, hidden), "out": struct(hidden, features)}
    return weights, struct(batch, features), struct(batch, features)


def _seconds(annotate, args, devices=8):
    program = gshard.jit(annotate, devices=devices, hardware="h100").lower(*args)
    return program.forecast().serial_seconds


def data_parallel(weights, x, y):
    return step(weights, gshard.split(x, 0, 8), gshard.split(y, 0, 8))


def tensor_parallel(weights, x, y):
    cut = {"in": gshard.split(weights["in"], 1, 8), "out": gshard.split(weights["out"], 0, 8)}
    return step(cut, x, y)


@pytest.mark.parametrize(("batch", "expert"), [(8192, data_parallel), (16, tensor_parallel)])
def test_large_batches_are_data_parallel_and_small_ones_tensor_parallel(batch, expert):
    args = arguments(batch)
    layout = gshard.auto(step, *args, devices=8, hardware="h100")
    assert layout.seconds <= 1.02 * _seconds(expert, args)
    assert layout.seconds == layout.lowered.forecast("h100").serial_seconds
    assert layout.memory_bytes == layout.lowered.forecast("h100").memory_bytes
    if expert is data_parallel:
        assert any(a.path == "[1]" and a.dims[0] for a in layout.annotations)
    else:
        assert not any(a.path in ("[1]", "[2]") for a in layout.annotations)
    assert len(layout.annotations) <= 4


def test_values_are_those_of_the_program():
    arrays = [random_array(a.shape) for a in jax.tree.leaves(arguments(16, 24, 40))]
    args = {"in": arrays[0], "out": arrays[1]}, arrays[2], arrays[3]
    layout = gshard.auto(step, *args, devices=8, hardware="h100")
    wanted = jax.jit(step)(*args)
    for got in (layout.jit()(*args), gshard.jit(step, annotations=layout)(*args)):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, wanted
        )
    for_jax = layout.to_jax()
    assert for_jax.mesh.size == 8
    shardings = {"in_shardings": for_jax.in_shardings, "out_shardings": for_jax.out_shardings}
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        jax.jit(step, **shardings)(*args),
        wanted,
    )


def apply(weights, x):
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return x


@pytest.mark.slow
def test_less_memory_costs_time_until_nothing_fits():
    weights = [jax.ShapeDtypeStruct((2048, 2048), jnp.float32)] * 4
    args = weights, jax.ShapeDtypeStruct((32768, 2048), jnp.float32)
    free = gshard.auto(apply, *args, devices=8, hardware="h100")
    limit = int(0.95 * free.memory_bytes)
    tight = gshard.auto(apply, *args, devices=8, hardware="h100", memory=limit)
    assert tight.memory_bytes <= limit
    assert tight.seconds > free.seconds
    for smaller, larger in itertools.pairwise(tight.frontier):
        assert smaller.memory_bytes < larger.memory_bytes
        assert smaller.seconds > larger.seconds
    assert not any(
        c.seconds < f.seconds and c.memory_bytes < f.memory_bytes
        for c in tight.considered
        for f in tight.frontier
    )
    assert len(tight.frontier) > 1
    with pytest.raises(ValueError, match=r"at most 1 MB .* too much; its peak is at .*test_auto"):
        gshard.auto(apply, *args, devices=8, hardware="h100", memory="1 MB")


def test_bad_input():
    args = arguments(16)
    with pytest.raises(ValueError, match="hardware is 'h1000'"):
        gshard.auto(step, *args, devices=8, hardware="h1000")
    with pytest.raises(ValueError, match="devices is 0"):
        gshard.auto(step, *args, devices=0)
    for memory in ("16 apples", "-3 GB", 0):
        with pytest.raises(ValueError, match="memory is"):
            gshard.auto(step, *args, devices=8, hardware="h100", memory=memory)
    assert bytes_of("1.5 GB") == 1_500_000_000
    assert bytes_of("2 GiB") == 2 << 30


def test_without_time_there_is_a_layout():
    layout = gshard.auto(step, *arguments(8192), devices=8, hardware="h100", seconds=0.0)
    assert layout.seconds == layout.lowered.forecast("h100").serial_seconds
    assert 0 < layout.bound <= layout.seconds


def test_what_people_try_first_is_tried_before_the_solver(monkeypatch):
    """A solver that takes all of the time, and finds nothing, does not keep it from being found."""

    def nothing(chooser, limits, clock, needed):
        chooser.clock.charge(chooser.clock.left)
        return []

    monkeypatch.setattr(_Chooser, "_choices", nothing)
    args = arguments(8192)
    layout = gshard.auto(step, *args, devices=8, hardware="h100")
    assert layout.seconds <= _seconds(data_parallel, args)


@pytest.mark.slow
@settings(max_examples=3, deadline=None)
@given(
    batch=st.sampled_from([8, 512, 16384]),
    features=st.sampled_from([64, 512]),
    hidden=st.sampled_from([96, 2048]),
    devices=st.sampled_from([2, 3, 4]),
)
def test_the_best_of_all_layouts_of_a_product(batch, features, hidden, devices):
    """Every mesh and every spec of both arguments, lowered: none is more than 1% better."""

    def product(x, w):
        return x @ w

    args = tuple(
        jax.ShapeDtypeStruct(s, jnp.float32) for s in ((batch, features), (features, hidden))
    )
    layout = gshard.auto(product, *args, devices=devices, hardware="h100")
    best = np.inf
    for mesh in mesh_shapes(devices):
        choices = [specs_of(a.shape, mesh) for a in args]
        for pair in itertools.product(*choices):
            shardings = tuple(
                sharding_of(s, 2, mesh) if any(d >= 0 for d in s) else None for s in pair
            )
            lowered = gshard.jit(
                product, in_shardings=shardings, devices=devices, hardware="h100"
            ).lower(*args)
            best = min(best, lowered.forecast().serial_seconds)
    assert layout.bound <= best
    assert layout.seconds <= 1.01 * best


def test_an_annotation_in_the_program_is_kept():
    args = arguments(16)
    subject = TracedProgram.of(data_parallel, args, 8)
    model = ModelBuilder(subject, (8,), hardware("h100"), 1e12).built()
    assert any(np.isinf(c).any() for c in model.problem.costs)
    layout = gshard.auto(data_parallel, *args, devices=8, hardware="h100")
    assert layout.lowered.collectives  # gradients of the weights are summed, if nothing else


def test_tensors_inside_are_annotated_by_line(tmp_path):
    """Two products on one line, the second by number; the annotation holds after a file."""

    def products(x, first, second):
        return x @ first @ second

    args = tuple(random_array(s) for s in ((64, 32), (32, 32), (32, 32)))
    lowered = gshard.jit(products, devices=8).lower(*args)
    assert not lowered.collectives
    flat = TracedProgram.of(products, args, 8).flat
    (place, _), (again, number) = places(flat).values()
    assert place == again
    assert number == 1
    assert place.source.startswith("test_auto.py:")
    inside = AnnotatedInside(place, (1,), ((), ("a",)))
    layout = gshard.Layout({"a": 8}, (), "h100", 1.0, 1, 1.0, inside=(inside,))
    layout.save(tmp_path / "layout.json")
    layout = gshard.Layout.load(tmp_path / "layout.json")
    jitted = gshard.jit(products, annotations=layout)
    assert [s.tiles for s in jitted.lower(*args).flat_shardings[1]] == [(1, 8)]
    np.testing.assert_allclose(jitted(*args), products(*args), rtol=1e-4, atol=1e-4)
    with pytest.raises(
        ValueError, match=r"made at test_auto\.py:\d+ dot_general 64x32, which this"
    ):
        gshard.jit(lambda x: x + 1, annotations=layout).lower(args[0])


@pytest.mark.slow
def test_a_state_keeps_its_sharding():
    """Without annotations of results the second step would begin with a reshard."""
    layout = gshard.auto(step, *arguments(16, 1024, 4096), devices=8, hardware="h100")
    given, made = layout.lowered.flat_shardings
    assert [s.tiles for s in given[:2]] == [s.tiles for s in made]
    assert any(max(s.tiles) > 1 for s in made)


@pytest.mark.slow
def test_what_each_annotation_saves_is_what_a_step_takes_without_it():
    args = arguments(8192)
    layout = gshard.auto(step, *args, devices=8, hardware="h100")
    for annotation in layout.annotations:
        own = (annotation.shape, annotation.dims)
        rest = tuple(a for a in layout.annotations if (a.shape, a.dims) != own)
        without = dataclasses.replace(layout, annotations=rest, results=())
        lowered = gshard.jit(step, annotations=without, devices=8, hardware="h100").lower(*args)
        more = lowered.forecast().serial_seconds - layout.seconds
        assert annotation.saves == pytest.approx(more)
    assert "saves" in str(layout)
    assert "the runner-up" in layout.explain()
    assert "links: " in layout.explain()
