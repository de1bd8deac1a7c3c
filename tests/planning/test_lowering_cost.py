"""What lowering costs, in calls of gshard's own functions: no clock, so no load, decides."""

import os
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

import gshard

OWN = os.path.dirname(gshard.__file__)


def step(weights, x):
    def loss(weights):
        h = gshard.split(x, 0, 8)
        for w in weights:
            normed = h / jnp.sqrt(jnp.mean(h * h, axis=-1, keepdims=True) + 1e-6) * w["scale"]
            h = h + jax.nn.gelu(normed @ w["up"]) @ w["down"]
        return jnp.mean(h * h)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


def calls_of(fn, *arguments):
    """The calls of each function while a program is lowered, and its equations."""
    traced, counts = gshard.jit(fn, devices=8), Counter()

    def count(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(OWN):
            counts[frame.f_code.co_name] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        lowered = traced.lower(*arguments)
    finally:
        sys.setprofile(before)
    return counts, lowered.num_equations


def calls_of_layers(layers):
    """Those of a step with so many layers."""
    shapes = {"scale": (64,), "up": (64, 256), "down": (256, 64)}
    weights = [{n: jax.ShapeDtypeStruct(s, "float32") for n, s in shapes.items()}] * layers
    return calls_of(step, weights, jax.ShapeDtypeStruct((32, 64), jnp.float32))


@pytest.mark.parametrize("layers", [16])
def test_calls_for_an_equation(layers):
    """It was 166 when JAX traced every equation again, 186 before somebody counted."""
    calls_of_layers(2)  # what is found once for a kind of equation
    (few, fewer), (many, more) = calls_of_layers(layers // 2), calls_of_layers(layers)
    each = (many.total() - few.total()) / (more - fewer)
    assert each < 145, many.most_common(20)


def slices(x, count):
    return sum(x[2 * i : 2 * i + 2] * i for i in range(count))


def updates(x, count):
    for i in range(count):
        x = x.at[2 * i].set(i * 1.0)
    return x


def gradients(x, count):
    return jax.grad(lambda x: jnp.sum(jnp.sin(slices(x, count))))(x)


def calls_of_rows(fn, count, rows):
    x = jax.ShapeDtypeStruct((rows, 4), jnp.float32)
    counts, _ = calls_of(lambda x: fn(gshard.split(x, 0, 8), count), x)
    return counts


@pytest.mark.parametrize(("fn", "most"), [(updates, 560), (slices, 1050), (gradients, 3000)])
def test_calls_for_a_slice_or_an_update(fn, most):
    """As many for each, however many there are; each has looked at all readers of its operand."""
    calls_of_rows(fn, 5, 800)
    few, some, many = (calls_of_rows(fn, n, 800).total() for n in (50, 100, 200))
    assert many - some <= 1.25 * 2 * (some - few)
    assert (many - some) / 100 < most


def chain(x, length):
    """Products, sums, slices and updates, one after the other."""
    for i in range(length // 5):
        y = x * 0.5 + i
        x = x.at[2 : 2 + len(x) // 2].add(jnp.tanh(y[: len(x) // 2]))
    return x


@pytest.mark.slow
def test_programs_of_ten_thousand_equations_are_linear():
    calls_of_rows(chain, 100, 256)  # what is found once for a kind of equation
    few, many = (calls_of_rows(chain, length, 256).total() for length in (1_000, 10_000))
    assert many <= 1.1 * 10 * few
