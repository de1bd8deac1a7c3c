"""Equal layers decided once; scanned beside unrolled layers; meshes of three axes, and of 6 and 12
devices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard.autosharding.cost import distinct_meshes
from gshard.autosharding.layers import without_equal_layers
from gshard.autosharding.layout.annotations import Annotated
from gshard.autosharding.traced import STANDING, TracedProgram
from gshard.forecast.hardware import hardware
from tests.oracle import random_array

LAYERS = 3


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def layer(x, weights):
    return x + jnp.tanh(x @ weights["in"]) @ weights["out"]


def unrolled(weights, x):
    for each in weights:
        x = layer(x, each)
    return jnp.sum(x**2)


def scanned(weights, x):
    x, _ = jax.lax.scan(lambda x, each: (layer(x, each), None), x, weights)
    return jnp.sum(x**2)


def step(loss):
    def one(weights, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))

    return one


def _lowered(fn, layout, args):
    return gshard.jit(step(fn), annotations=layout, devices=8, hardware="h100").lower(*args)


def _bytes(lowered):
    return sum(c.total_bytes for c in lowered.collectives)


def _unstacked(annotations, prefix, count=LAYERS):
    """Annotations of stacked weights, for each layer by itself."""
    for a in annotations:
        if not a.path.startswith(prefix):
            yield a
            continue
        name = a.path[len(prefix) :]
        for number in range(count):
            yield Annotated(f"{prefix}[{number}]{name}", a.shape[1:], a.dims[1:])


def _stacked(annotations, prefix):
    """Annotations of the middle layer, for all layers in a stack."""
    middle = f"{prefix}[1]"
    for a in annotations:
        if a.path.startswith(middle):
            name = a.path[len(middle) :]
            yield Annotated(prefix + name, (LAYERS, *a.shape), ((), *a.dims))
        elif not a.path.startswith(prefix):
            yield a


def _moved(layout, move):
    return dataclasses.replace(
        layout,
        annotations=tuple(move(layout.annotations, "[0]")),
        results=tuple(move(layout.results, "result")),
        inside=(),
    )


@pytest.mark.slow
@pytest.mark.parametrize("rows", [64, 16_384])
def test_neither_scanned_nor_unrolled_layers_miss_a_layout_of_the_other(rows):
    """The layout of a scan, given to unrolled layers, is no faster there than the one found for
    them, and the other way round."""
    one = {"in": struct(1024, 4096), "out": struct(4096, 1024)}
    x = struct(rows, 1024)
    arguments = {
        scanned: (jax.tree.map(lambda w: struct(LAYERS, *w.shape), one), x),
        unrolled: ([one] * LAYERS, x),
    }
    found = {
        fn: gshard.auto(step(fn), *args, devices=8, hardware="h100")
        for fn, args in arguments.items()
    }
    moved = {
        scanned: _moved(found[unrolled], _stacked),
        unrolled: _moved(found[scanned], _unstacked),
    }
    for fn, args in arguments.items():
        own, others = found[fn], _lowered(fn, moved[fn], args)
        assert own.seconds <= (1 + 1e-9) * others.forecast().serial_seconds
        if rows == 64:  # tensor parallel: a scan sends what unrolled layers send
            assert _bytes(own.lowered) == _bytes(others)
    if rows == 64:
        # One all-reduce of the activations in each pass of each layer. Nothing reads the last one
        # of the backward pass; unrolled layers leave it out, a scan cannot.
        reduced = 2 * rows * 1024 * 4 * 7 // 8
        assert _bytes(found[scanned].lowered) == 2 * LAYERS * reduced
        assert _bytes(found[unrolled].lowered) == (2 * LAYERS - 1) * reduced
    else:
        # Gradients are scattered and weights gathered once, before the step or after it.
        once = 2 * LAYERS * 1024 * 4096 * 4 * 7 // 8
        assert [_bytes(found[fn].lowered) for fn in arguments] == [2 * once, 2 * once]


def clipped(weights, moments, x):
    """A step with moments, and with gradients clipped by their norm: a sum over all layers."""
    value, grads = jax.value_and_grad(unrolled)(weights, x)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    moments = jax.tree.map(lambda m, g: 0.9 * m + g / jnp.maximum(norm, 1.0), moments, grads)
    return jax.tree.map(lambda w, m: w - 0.1 * m, weights, moments), moments, value


def _clipped_arguments(layers, rows=64, width=16):
    weights = [{"in": struct(width, 4 * width), "out": struct(4 * width, width)}] * layers
    return weights, weights, struct(rows, width)


def test_a_program_without_most_of_its_layers_is_the_one_with_few():
    """Its forecast is that of a function of few layers; with two layers less, the memory of all
    layers follows. The first layer has no gradient of its input, so that it is kept too."""
    machine = hardware("h100")

    def forecast(fn, args):
        return gshard.jit(fn, devices=8, hardware=machine).lower(*args).forecast()

    args = _clipped_arguments(12)
    subject = TracedProgram.of(clipped, args, 8)
    parts = without_equal_layers(subject)
    found = []
    for part, layers in zip(parts, (5, 3), strict=True):
        assert part.repeated.layers == 12
        assert part.repeated.times == 13 - layers
        assert len(part.states) == 4 * layers
        found.append(forecast(part.fn, part.args))
        few = forecast(clipped, _clipped_arguments(layers))
        assert found[-1].memory_bytes == few.memory_bytes
        assert found[-1].serial_seconds == pytest.approx(few.serial_seconds)
    more, less = found
    every = more.memory_bytes + 7 * (more.memory_bytes - less.memory_bytes) // 2
    assert every == pytest.approx(forecast(clipped, args).memory_bytes, rel=0.01)
    standing = [t for t in more.values if STANDING in t.scope]
    seconds = more.serial_seconds + 7 * sum(t.alone_seconds * t.count for t in standing)
    assert seconds == pytest.approx(forecast(clipped, args).serial_seconds, rel=0.05)
    # Each value of another layer is like one of the third.
    given = dict(zip(subject.arguments, [path for path, _ in subject.paths], strict=True))
    others = {var: like for var, like in parts[0].repeated.like.items() if like is not var}
    assert {given[like] for var, like in others.items() if var in given} == {
        f"[{tree}][2]['{name}']" for tree in range(2) for name in ("in", "out")
    }


def _across(weights, x):
    """The last layers read the results of the first."""
    kept = []
    for number, each in enumerate(weights):
        x = layer(x, each)
        kept.append(x)
        x = x + kept[len(weights) - 1 - number] if 2 * number >= len(weights) else x
    return jnp.sum(x)


def test_layers_that_are_few_or_not_equal_are_decided_one_by_one():
    cases = (unrolled, [64] * 7), (_across, [64] * 12), (unrolled, range(64, 160, 8))
    for fn, sizes in cases:
        weights = [{"in": struct(16, n), "out": struct(n, 16)} for n in sizes]
        subject = TracedProgram.of(step(fn), (weights, struct(64, 16)), 8)
        assert without_equal_layers(subject) is None


def test_equal_layers_are_decided_once():
    """What is found for one of them is used for all, and said; the values are those of the
    function."""
    args = _clipped_arguments(10)
    layout = gshard.auto(clipped, *args, devices=8, hardware="cpu", seconds=5)
    assert layout.layers == 10
    assert "decided for one of 10 equal layers" in str(layout)
    dims = {a.path: a.dims for a in layout.annotations}
    for name in ("in", "out"):
        assert len({dims.get(f"[0][{n}]['{name}']") for n in range(3, 8)}) == 1
    values = jax.tree.map(lambda s: random_array(s.shape) / 8, args)  # ten layers keep their size
    got, expected = layout.jit()(*values), jax.jit(clipped)(*values)
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=1e-4, atol=1e-5), got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [64, 16_384])
def test_many_equal_layers_get_a_layout_as_good_as_that_of_a_scan(rows):
    one = {"in": struct(1024, 4096), "out": struct(4096, 1024)}
    x, count = struct(rows, 1024), 12
    stacked = jax.tree.map(lambda w: struct(count, *w.shape), one)
    scan = gshard.auto(step(scanned), stacked, x, devices=8, hardware="h100")
    args = [one] * count, x
    found = gshard.auto(step(unrolled), *args, devices=8, hardware="h100")
    assert found.layers == count
    others = _lowered(unrolled, _moved(scan, functools.partial(_unstacked, count=count)), args)
    assert found.seconds <= 1.01 * others.forecast().serial_seconds
    assert _bytes(found.lowered) <= 1.01 * _bytes(others)


def test_a_list_of_layers_is_a_state():
    """All results together are the argument of the next step, and are sharded like it."""
    weights = [{"in": struct(1024, 4096), "out": struct(4096, 1024)}] * LAYERS
    subject = TracedProgram.of(step(unrolled), (weights, struct(64, 1024)), 8)
    assert len(subject.states) == 2 * LAYERS
    assert all(result == f"result{argument[3:]}" for result, argument in subject.states)


def test_meshes_have_up_to_three_axes():
    machine = hardware("h100")
    assert set(distinct_meshes(machine, 8)) == {(2, 2, 2), (2, 4), (8,)}
    for devices in (6, 12):
        found = distinct_meshes(machine, devices)
        assert all(np.prod(mesh) == devices for mesh in found)
        assert (devices,) in found
    assert {tuple(sorted(m)) for m in distinct_meshes(machine, 12)} >= {(2, 6), (3, 4), (2, 2, 3)}


def product(x, w):
    return jnp.einsum("abk,kn->abn", x, w)


@pytest.mark.slow
def test_three_axes_together():
    """Three dims of 2 rows or columns: only a mesh of three axes uses all 8 devices."""
    args = struct(2, 2, 65_536), struct(65_536, 2)
    layout = gshard.auto(lambda x, w: product(x, w) + 1.0, *args, devices=8, hardware="h100")
    assert (2, 2, 2) in layout.meshes
    wide = struct(2, 2, 4096), struct(4096, 4096)
    layout = gshard.auto(product, *wide, devices=8, hardware="h100")
    own = gshard.jit(product, devices=8, hardware="h100")
    assert layout.seconds < own.lower(*wide).forecast().serial_seconds


@pytest.mark.parametrize("devices", [6, 12])
def test_numbers_of_devices_that_are_no_powers_of_two(devices):
    args = random_array((24, 18)), random_array((18, 30))
    fn = jnp.dot
    large = gshard.auto(fn, struct(49_152, 1024), struct(1024, 1024), devices=devices,
                        hardware="h100")  # fmt: skip
    assert np.prod(list(large.mesh.values())) == devices
    assert large.annotations
    if devices <= len(jax.devices()):
        layout = gshard.auto(fn, *args, devices=devices, hardware="h100")
        np.testing.assert_allclose(layout.jit()(*args), fn(*args), rtol=1e-4, atol=1e-4)
