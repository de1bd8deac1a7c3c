"""`gshard.auto` and effects: functions that have some are refused, with their line."""

import inspect

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import io_callback

import gshard
from gshard.autosharding.traced import border_ends, leaving_borders
from gshard.propagation.flow import Flow
from tests.autosharding.test_bound import struct


def _line_of(fn, text):
    lines, first = inspect.getsourcelines(fn)
    return first + next(i for i, line in enumerate(lines) if text in line)


def _prints(x, w):
    y = x @ w
    jax.debug.print("mean {}", jnp.mean(y))
    return y


def _orders(x, w):
    jax.debug.callback(print, x[0, 0], ordered=True)
    return x @ w


def _calls_in_a_loop(x, w):
    def body(x, _):
        io_callback(lambda _: None, None, x)
        return x @ w, None

    return jax.lax.scan(body, x, None, length=3)[0]


def _writes(ref, w):
    ref[...] = jnp.ones_like(w)
    return w


@pytest.mark.parametrize(
    ("fn", "text", "kind"),
    [
        (_prints, "debug.print", "Debug"),
        (_orders, "debug.callback", "OrderedDebug"),
        (_calls_in_a_loop, "io_callback", "IO"),
        (_writes, "ref[...]", "Write"),
    ],
)
def test_effects_are_refused_with_their_line(fn, text, kind):
    w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    first = jax.new_ref(jnp.zeros((64, 64))) if fn is _writes else w
    line = _line_of(fn, text)
    with pytest.raises(ValueError, match=rf"test_traced\.py:{line}: .* has an effect \({kind}\)"):
        gshard.auto(fn, first, w, devices=8, hardware="h100")


def test_what_stays_inside_a_function_is_no_effect():
    """A reference of its own, and a callback that JAX takes for a function of arrays."""

    def inner(x, w):
        total = jax.new_ref(jnp.zeros(x.shape))
        total[...] += x
        return jax.pure_callback(lambda y: y, x, total[...]) @ w

    w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    assert gshard.auto(inner, w, w, devices=8, hardware="h100", seconds=5.0).seconds > 0


def test_values_flow_into_a_loop_to_its_next_run_and_out_of_it():
    """A loop in a loop, whose results are the outer body's."""

    def fn(x, ws):
        def body(c, w):
            return jax.lax.scan(lambda c, v: (c * v, c + v), c, w)

        return jax.lax.scan(body, x, ws)

    flat = jax.make_jaxpr(fn)(struct(16), struct(3, 2, 16))
    flow = Flow(flat.jaxpr, 8)
    outwards = leaving_borders(flat)
    found = {border_ends(edge, outwards) for edge in flow.edges if edge.eqn is None}
    (outer,) = flat.eqns
    body = outer.params["jaxpr"].jaxpr
    (inner,) = body.eqns
    last = inner.params["jaxpr"].jaxpr
    expected = set()
    for loop, inside in ((outer, body), (inner, last)):
        (first, each), (carry, slices) = loop.invars, inside.invars
        (end, stack), (again, made) = loop.outvars, inside.outvars
        expected |= {(first, carry), (each, slices), (again, carry), (carry, end), (made, stack)}
    assert found == expected
