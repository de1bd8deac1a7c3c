"""`layout.to_jax()`: plain `jax.jit` with the layout's shardings, and constraints inside."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard.autosharding.layout.annotations import Annotated, AnnotatedInside
from gshard.autosharding.traced import TracedProgram
from gshard.capture.inside import places
from tests.oracle import random_array


def products(x, first, second):
    return jnp.tanh(x @ first) @ second


def looped(x, weights):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)
    return x


def _layout(fn, args, annotations, dims):
    """A layout with the first product annotated inside."""
    subject = TracedProgram.of(fn, args, 8)
    place = next(p for p, _ in places(subject.flat).values() if p.operator == "dot_general")
    inside = (AnnotatedInside(place, (0,), dims),)
    layout = gshard.Layout({"a": 8}, annotations, "h100", 1.0, 1, 1.0, inside=inside)
    lowered = gshard.jit(fn, annotations=layout, devices=8).lower(*args)
    return gshard.Layout(
        {"a": 8}, annotations, "h100", 1.0, 1, 1.0, inside=inside, lowered=lowered, function=fn
    )


def _compiled(layout, args):
    given = layout.to_jax()
    jitted = jax.jit(
        given.function, in_shardings=given.in_shardings, out_shardings=given.out_shardings
    )
    return jitted.lower(*args).compile()


def _collectives(compiled):
    """The kinds of collectives that XLA has put into the program."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    return sorted(re.findall(rf" ({kinds})(?:-start)?\(", compiled.as_text()))


def _check(fn, args, compiled):
    np.testing.assert_allclose(compiled(*args), fn(*args), rtol=1e-4, atol=1e-4)


def test_a_constraint_decides_what_is_sent():
    """With rows split all weights are there, and nothing is sent; if the hidden values are to be
    split by columns, they have to move."""
    args = tuple(random_array(s) for s in ((64, 32), (32, 64), (64, 16)))
    rows = (Annotated("[0]", (64, 32), (("a",), ())),)
    alike = _compiled(_layout(products, args, rows, (("a",), ())), args)
    moved = _compiled(_layout(products, args, rows, ((), ("a",))), args)
    assert _collectives(alike) == []
    assert _collectives(moved) != []
    _check(products, args, alike)
    _check(products, args, moved)


def test_constraints_in_the_body_of_a_loop():
    args = random_array((64, 32)), random_array((3, 32, 32))
    rows = (Annotated("[0]", (64, 32), (("a",), ())),)
    alike = _compiled(_layout(looped, args, rows, (("a",), ())), args)
    moved = _compiled(_layout(looped, args, rows, ((), ("a",))), args)
    assert _collectives(alike) == []
    assert _collectives(moved) != []
    _check(looped, args, alike)
    _check(looped, args, moved)


def test_a_layout_without_annotations_inside_is_the_function_itself():
    args = tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8192, 64), (64, 64), (64, 64)))
    layout = gshard.auto(products, *args, devices=8, hardware="h100")
    assert not layout.inside
    assert layout.to_jax().function is products


def test_sizes_that_do_not_divide_are_replicated():
    """JAX has no shardings of 30 rows over 8 devices."""
    args = tuple(random_array(s) for s in ((30, 32), (32, 64), (64, 16)))
    chosen = (Annotated("[0]", (30, 32), (("a",), ())), Annotated("[2]", (64, 16), (("a",), ())))
    layout = _layout(products, args, chosen, (("a",), ()))
    x, _, second = layout.to_jax().in_shardings
    assert x.is_fully_replicated
    assert second.spec == jax.sharding.PartitionSpec(("a",), None)
    _check(products, args, _compiled(layout, args))


def test_what_is_no_array_is_named():
    """Equinox models have functions among their leaves."""

    def apply(model, x):
        return model["activation"](x @ model["w"])

    args = {"activation": jnp.tanh, "w": random_array((16, 16))}, random_array((8, 16))
    layout = gshard.auto(apply, *args, devices=8, hardware="h100", seconds=1.0)
    with pytest.raises(ValueError, match=r"argument \[0\]\['activation'\] is .* arrays only"):
        layout.to_jax()
