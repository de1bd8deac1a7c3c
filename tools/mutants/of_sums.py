"""Programs of windows, sums, products and loops."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard import replicate, shard, split
from tools.mutants.programs import array, given, wide


@given(array(2, 1, 29), array(1, 1, 5))
def _convolution(x: Any, w: Any) -> Any:
    x = split(x * 2, 2, 8)
    y = lax.conv_general_dilated(x, w, (2,), [(3, 1)], rhs_dilation=(2,))  # here
    return y + 1


@given(array(1, 1, 13), array(1, 1, 3))
def _dilated(x: Any, w: Any) -> Any:
    x = split(x * 2, 2, 4)
    y = lax.conv_general_dilated(x, w, (1,), [(1, 2)], lhs_dilation=(3,))  # here
    return y + 1


@given(array(30))
def _pooled(x: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = lax.reduce_window(x, -jnp.inf, lax.max, (5,), (2,), [(2, 1)])  # here
    return y + 1


@wide(array(13, 6))
def _sum(x: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = x.sum(0)  # here
    return y + 1


@wide(array(13, 6))
def _prod(x: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = jnp.prod(x, 0)  # here
    return y + 1


@wide(array(13, 6) - 9)
def _max(x: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = x.max(0)  # here
    return y + 1


@wide(array(13, 6, dtype="int32"))
def _min_of_integers(x: Any) -> Any:
    x = split(x + 20, 0, 8)
    y = x.min(0)  # here
    return y + 1


@wide(array(13, 6))
def _all(x: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = jnp.all(x > -9, axis=0) & ~jnp.any(x > 9, axis=0)  # here
    return ~y


@wide(array(13, 6) - 5)
def _argmax(x: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = jnp.argmax(x, 0)  # here
    return y + 1


@wide(array(13, 6))
def _scanned(x: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = lax.cumsum(x, 0, reverse=True) + lax.cumprod(x, 0, reverse=True)  # here
    return y + 1


@given(array(13, 21), array(21, 10))
def _product(a: Any, b: Any) -> Any:
    a, b = split(a * 2, 1, 8), split(b * 2, 0, 8)
    y = a @ b  # here
    return y + 1


@given(array(16, 32), array(32, 16))
def _scattered(a: Any, b: Any) -> Any:
    a, b = split(a * 2, 1, 8), split(b * 2, 0, 8)
    y = split(a @ b, 0, 8)  # here
    return y + 1


@given(array(16, 13), array(13, 24), memory_limit=64)
def _in_a_ring(a: Any, b: Any) -> Any:
    a, b = split(a * 2, 0, 8), split(b * 2, 1, 8)
    y = a @ b  # here
    return split(y, 0, 8) + 1


@given(array(13, 6), array(4, 6, 6))
def _in_a_loop(x: Any, w: Any) -> Any:
    x = split(x * 2, 1, 3)
    y = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0]  # here
    return y + 1


@given(array(4, 13, 6), shows=["control-carried"])
def _accumulated(x: Any) -> Any:
    x = split(x * 2, 1, 8)
    y = lax.scan(lambda total, x: (total + x.T @ x, None), jnp.zeros((6, 6)), x)[0]  # here
    return y + 1


@given(array(13, 8), array(8, 6), array(8, 6))
def _added(x: Any, a: Any, b: Any) -> Any:
    x = split(x * 2, 1, 8)
    y = x @ a + (x + 1) @ b  # here
    return jnp.tanh(y)


@wide(array(13, 6) + 1j * array(6, 13).T)
def _complex_max(x: Any) -> Any:
    x = split(x.real.astype(jnp.int32) + 1j * x.imag, 0, 8)
    y = x.max(0)  # here
    return y + 1


@wide(array(13, 6), array(13, 6))
def _folded(x: Any, z: Any) -> Any:
    x, z = split(x * 2, 0, 8), split(z * 2, 0, 8)
    start = jnp.float32(3), jnp.float32(-9)
    y = lax.reduce((x, z), start, lambda a, b: (a[0] * b[0], a[1] + b[1]), (0,))  # here
    return y[0] + 1, y[1] + 1


@wide(array(13, 6) - 5)
def _of_few(x: Any) -> Any:
    x = shard(x * 2, np.arange(3).reshape(3, 1))
    y = jnp.argmax(x, 0)  # here
    return split(y, 0, 8) + 1


@wide(array(32, 2) - 9)
def _wide_window(x: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = lax.reduce_window(x, 0.0, lax.add, (35, 1), (1, 1), [(3, 4), (0, 0)])  # here
    return y + 1


@given(array(16, 13), array(13, 24), memory_limit=64)
def _in_a_ring_of_terms(a: Any, b: Any) -> Any:
    a, b = split(a * 2, 1, 8), split(b * 2, 1, 8)
    y = a @ b  # here
    return split(y, 1, 8) + 1


@given(array(40, 6), array(3, 6, 5), np.array([7, 20, 11], np.int32))
def _ragged(x: Any, w: Any, sizes: Any) -> Any:
    w = split(w * 2, 0, 3)
    y = lax.ragged_dot(x, w, sizes)  # here
    return y + 1


@given(array(2, 16, 12, 4), array(3, 3, 4, 5))
def _upsampled(x: Any, w: Any) -> Any:
    x = split(x * 2, 1, 8)
    y = jax.nn.relu(jnp.repeat(jnp.repeat(x, 2, 2), 2, 1))
    numbers = ("NHWC", "HWIO", "NHWC")
    y = lax.conv_general_dilated(y, w, (1, 1), "SAME", dimension_numbers=numbers)  # here
    return y + 1


@given(array(16, 12, 8), array(48, 12, 2))
def _upsampled_and_joined(x: Any, z: Any) -> Any:
    x, z = split(x * 2, 0, 8), split(z * 2, 0, 8)
    y = jnp.concatenate([jnp.repeat(x, 3, 0), z], 2)
    y = lax.reduce_window(y, -jnp.inf, lax.max, (4, 1, 1), (1, 1, 1), "SAME")  # here
    return y + 1


@given(array(16, 64), array(64, 32), array(32, 64), array(16, 64))
def _kept_sum(x: Any, a: Any, b: Any, bias: Any) -> Any:
    a, b = split(a, 1, 8), split(b, 0, 8)
    y = jnp.tanh(x @ a) @ b + split(bias * 2, 0, 8) - replicate(bias * 3)  # here
    return jnp.tanh(y.sum(0))


@given(array(13, 5), array(5, 7))
def _turned_product(a: Any, b: Any) -> Any:
    a = split(a * 2, 0, 8)
    y = (a @ b).T  # here
    return split(y, 1, 8) + 1


@given(array(24, 3), array(24, 3), shows=["scan-first-block", "scan-shifted", "scan-last-row"])
def _scanned_in_blocks(a: Any, b: Any) -> Any:
    """`lax.associative_scan` of an operator that does not commute, in both directions."""

    def after(first: Any, second: Any) -> Any:
        return first[0] * second[0], first[1] * second[0] + second[1]

    a, b = split(a * 2, 0, 8), split(b * 2, 0, 8)
    y = lax.associative_scan(after, (a, b))[1]  # here
    z = lax.associative_scan(after, (a, b), reverse=True)[1]  # here
    return y + 1, z + 1


@given(array(4, 13, 6), shows=["planner-not-wanted"])
def _returned_after_a_loop(x: Any) -> Any:
    """The sum of a loop waits for the last operator, whose result is what has to be reduced."""
    x = split(x * 2, 1, 8)
    y = lax.scan(lambda total, x: (total + x.T @ x, None), jnp.zeros((6, 6)), x)[0]
    return y * 3  # here
