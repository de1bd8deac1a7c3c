"""A program as operators: bodies of loops inside it, and calls inlined."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core.primitives import scan_p

import gshard
from gshard.forecast.compilers import COMPILERS
from gshard.forecast.program import body_of


def products(fn, *shapes, compiler):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    jaxpr = gshard.jit(fn, devices=1).lower(*args).jaxpr
    found = body_of(jaxpr, compiler).walk()
    return [
        (o, n, around) for o, n, around in found if "dot_general" in {m.name for m in o.members}
    ]


@pytest.mark.parametrize("compiler", COMPILERS)
def test_operators_of_loops_in_loops(compiler):
    def fn(x, w):
        def inner(x, _):
            return jnp.tanh(x @ w), None

        def outer(x, _):
            return lax.scan(inner, x, length=5)[0] @ w, None

        return lax.scan(outer, x, length=3)[0] @ w

    found = products(fn, (8, 8), (8, 8), compiler=compiler)
    assert sorted((times, len(around)) for _, times, around in found) == [(1, 0), (3, 1), (15, 2)]
    assert all(e.primitive is scan_p for _, _, around in found for e in around)


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_function_that_is_called_twice_has_values_of_its_own_each_time(compiler):
    layer = jax.jit(lambda x, w: jnp.tanh(x @ w))
    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    jaxpr = jax.make_jaxpr(lambda x, w: layer(layer(x, w), w))(shape, shape).jaxpr
    body = body_of(jaxpr, compiler)
    written = [v for operator in body.operators for v in operator.writes]
    assert len(written) == len(set(written))
    made = {v for o in body.operators for v in o.writes}
    assert all(v in made or v in body.inputs for o in body.operators for v in o.reads)
    assert sum("dot_general" in {m.name for m in o.members} for o in body.operators) == 2


@pytest.mark.parametrize("distinct", [1, 2, 3])
def test_what_a_loop_carries_twice_is_copied_as_xla_does(distinct):
    def fn(x):
        values = [jnp.sin(x), jnp.cos(x), jnp.tan(x)]
        first = [values[n % distinct] for n in range(3)]

        def body(carry, _):
            a, b, c = carry
            return (2 * a + b, b @ b, c + 1), None

        return lax.scan(body, tuple(first), length=3)[0]

    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    text = jax.jit(fn).lower(x).compile().as_text()
    copies = re.findall(r"= f32\[64,64\]\S* copy\(", text[text.index("ENTRY") :])
    found = body_of(jax.make_jaxpr(fn)(x).jaxpr, "cpu").walk()
    added = [(o.bytes, n, around) for o, n, around in found if o.root.name == "copy"]
    assert added == [(2 * 64 * 64 * 4, 1, ())] * len(copies)
    assert len(copies) == 3 - distinct
