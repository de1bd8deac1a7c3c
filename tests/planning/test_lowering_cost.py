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


def calls_of(layers):
    """The calls of each function while so many layers are lowered."""
    shapes = {"scale": (64,), "up": (64, 256), "down": (256, 64)}
    weights = [{n: jax.ShapeDtypeStruct(s, "float32") for n, s in shapes.items()}] * layers
    traced = gshard.jit(step, devices=8)
    counts = Counter()

    def count(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(OWN):
            counts[frame.f_code.co_name] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        lowered = traced.lower(weights, jax.ShapeDtypeStruct((32, 64), jnp.float32))
    finally:
        sys.setprofile(before)
    return counts, lowered.num_equations


@pytest.mark.parametrize("layers", [16])
def test_calls_for_an_equation(layers):
    """It was 166 when JAX traced every equation again, 186 before somebody counted."""
    calls_of(2)  # what is found once for a kind of equation
    (few, fewer), (many, more) = calls_of(layers // 2), calls_of(layers)
    each = (many.total() - few.total()) / (more - fewer)
    assert each < 145, many.most_common(20)
