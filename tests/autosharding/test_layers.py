"""Scanned beside unrolled layers; meshes of three axes, and of 6 and 12 devices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard.autosharding.cost.rates import distinct_meshes
from gshard.autosharding.layout.annotations import Annotated
from gshard.autosharding.traced import TracedProgram
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


def _unstacked(annotations, prefix):
    """Annotations of stacked weights, for each layer by itself."""
    for a in annotations:
        if not a.path.startswith(prefix):
            yield a
            continue
        name = a.path[len(prefix) :]
        for number in range(LAYERS):
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
