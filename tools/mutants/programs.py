"""Small programs, each with one operator whose line is known: what a mutant does shows in some.

`# here` marks the line that a wrong value comes from, if the program has any.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard import replicate, shard, split

Made = tuple[Callable[..., Any], Sequence[np.ndarray], dict[str, Any]]


@dataclass(frozen=True)
class Program:
    """Makes a function, its arguments, and the keywords of `gshard.jit`.

    Nothing of JAX runs before it is made: processes fork until then.
    """

    name: str
    make: Callable[[], Made]
    file: str
    lines: Collection[int]  # those that may be named


def _written(
    function: Callable[..., Any], arguments: Sequence[np.ndarray], number: int = 0, **keywords: Any
) -> None:
    text, first = inspect.getsourcelines(function)
    lines = {first + n for n, line in enumerate(text) if "# here" in line}
    name = f"{function.__name__} {number}"
    PROGRAMS.append(Program(name, lambda: (function, arguments, keywords), __file__, lines))


def _array(*shape: int, dtype: str = "float32") -> np.ndarray:
    rng = np.random.default_rng(shape)
    if dtype.startswith("int"):
        return rng.integers(-9, 10, size=shape).astype(dtype)
    return rng.normal(size=shape).astype(dtype)


PROGRAMS: list[Program] = []


def _with(*arguments: np.ndarray, **keywords: Any) -> Callable[..., Any]:
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        _written(function, arguments, **keywords)
        return function

    return add


def _wide(*arguments: np.ndarray) -> Callable[..., Any]:
    """Arrays, and as many rows of more columns: many bytes are planned otherwise than few."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        _written(function, arguments)
        _written(function, [np.tile(x, (1, 400)) if x.ndim == 2 else x for x in arguments], 1)
        return function

    return add


@_with(_array(2, 1, 29), _array(1, 1, 5))
def _convolution(x: Any, w: Any) -> Any:
    x = split(x * 2, 2, 8)
    y = lax.conv_general_dilated(x, w, (2,), [(3, 1)], rhs_dilation=(2,))  # here
    return y + 1


@_with(_array(1, 1, 13), _array(1, 1, 3))
def _dilated(x: Any, w: Any) -> Any:
    x = split(x * 2, 2, 4)
    y = lax.conv_general_dilated(x, w, (1,), [(1, 2)], lhs_dilation=(3,))  # here
    return y + 1


@_with(_array(30))
def _pooled(x: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = lax.reduce_window(x, -jnp.inf, lax.max, (5,), (2,), [(2, 1)])  # here
    return y + 1


@_wide(_array(13, 6))
def _sum(x: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = x.sum(0)  # here
    return y + 1


@_wide(_array(13, 6))
def _prod(x: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = jnp.prod(x, 0)  # here
    return y + 1


@_wide(_array(13, 6) - 9)
def _max(x: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = x.max(0)  # here
    return y + 1


@_wide(_array(13, 6, dtype="int32"))
def _min_of_integers(x: Any) -> Any:
    x = split(x + 20, 0, 8)
    y = x.min(0)  # here
    return y + 1


@_wide(_array(13, 6))
def _all(x: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = jnp.all(x > -9, axis=0) & ~jnp.any(x > 9, axis=0)  # here
    return ~y


@_wide(_array(13, 6) - 5)
def _argmax(x: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = jnp.argmax(x, 0)  # here
    return y + 1


@_wide(_array(13, 6))
def _scanned(x: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = lax.cumsum(x, 0, reverse=True) + lax.cumprod(x, 0)  # here
    return y + 1


@_wide(_array(29, 3))
def _cut(x: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = split(x[5:23], 0, 8)  # here
    return y + 1


@_wide(_array(29, 3))
def _thinned(x: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = split(x[2:27:3], 0, 8)  # here
    return y + 1


@_wide(_array(29, 3))
def _row(x: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = x[7:10]  # here
    return jnp.tanh(y)


@_wide(_array(13, 3))
def _padded(x: Any) -> Any:
    x = split(x * 2, 0, 4)
    y = lax.pad(x, 7.0, [(3, 2, 1), (0, 0, 0)])  # here
    return y + 1


@_wide(_array(13, 3))
def _reversed(x: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = x[::-1]  # here
    return y + 1


@_wide(_array(13, 3), _array(6, 3))
def _joined(x: Any, z: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = split(jnp.concatenate([x, z, x]), 0, 8)  # here
    return y + 1


@_wide(_array(16, 3))
def _rolled(x: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = jnp.roll(x, 3, 0)  # here
    return y + 1


@_wide(_array(13, 3))
def _repeated(x: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = split(jnp.tile(x, (3, 1)), 0, 8)  # here
    return y + 1


@_wide(_array(29, 3), _array(7, dtype="int32"))
def _looked_up(x: Any, i: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = x[i * 4]  # here
    return y + 1


@_wide(_array(29, 3), _array(7, dtype="int32"), _array(7, 3))
def _added_at(x: Any, i: Any, u: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = x.at[i * 4].add(split(u, 0, 7))  # here
    return y + 1


@_wide(_array(29, 3), _array(1, dtype="int32"))
def _window_at(x: Any, i: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = split(lax.dynamic_slice_in_dim(x, i[0] + 11, 16), 0, 8)  # here
    return y + 1


@_wide(_array(29, 3), _array(1, dtype="int32"))
def _window_beyond(x: Any, i: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = split(lax.dynamic_slice_in_dim(x, i[0] + 40, 16), 0, 8)  # here
    return y + 1


@_wide(_array(29, 3), _array(6, 3), _array(1, dtype="int32"))
def _written_at(x: Any, u: Any, i: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = lax.dynamic_update_slice(x, u, (i[0] + 12, 0))  # here
    return y + 1


@_wide(_array(32, 2), np.int32(11))
def _rotated(x: Any, i: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = split(lax.dynamic_slice_in_dim(x, i, 20, 0), 0, 8)  # here
    return y + 1


@_wide(_array(32, 2), np.int32(3))
def _shifted(x: Any, i: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = split(lax.dynamic_slice_in_dim(x, i, 29, 0), 0, 8)  # here
    return y + 1


@_wide(_array(32, 2), _array(28, 2), np.int32(3))
def _rotated_in(x: Any, u: Any, i: Any) -> Any:
    x, u = split(x * 2, 0, 8), split(u * 2, 0, 8)
    y = split(lax.dynamic_update_slice_in_dim(x, u, i, 0), 0, 8)  # here
    return y + 1


@_wide(_array(16, 3), np.int32(3))
def _window_of_all(x: Any, i: Any) -> Any:
    x = replicate(x * 2)
    y = split(lax.dynamic_slice_in_dim(x, i, 13, 0), 0, 8)  # here
    return y + 1


@_with(_array(8 * 8192 - 5, dtype="int32"))
def _sorted_with(x: Any) -> Any:
    x = split(x * 2, 0, 8)
    y, z = lax.sort((x, split(jnp.arange(x.size), 0, 8)), num_keys=1)  # here
    return split(y, 0, 8) + 1, split(z, 0, 8) + 1


@_with(_array(8 * 4096 - 5, dtype="int32"))
def _sorted_integers(x: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = split(lax.sort(x), 0, 8)  # here
    return y + 1


@_with(_array(101))
def _sorted(x: Any) -> Any:
    x = split(x * 2, 0, 4)
    y = jnp.sort(x)  # here
    return y + 1


@_with(_array(2, 61) - 3)
def _best(x: Any) -> Any:
    x = split(x * 2, 1, 8)
    y, i = lax.top_k(x, 3)  # here
    return y + 1, i + 1


@_with(_array(6, 4, 5))
def _mixed(x: Any) -> Any:
    x = split(x * 2, 0, 4)
    y = split(x.reshape(8, 3, 5), 0, 4)  # here
    return y + 1


@_with(_array(16, 24))
def _exchanged(x: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = split(x, 1, 8)  # here
    return y + 1


@_with(_array(13, 10))
def _moved(x: Any) -> Any:
    x = shard(x * 2, np.arange(8).reshape(4, 2))
    y = shard(x, np.arange(6).reshape(2, 3))  # here
    return y + 1


@_with(_array(13, 21), _array(21, 10))
def _product(a: Any, b: Any) -> Any:
    a, b = split(a * 2, 1, 8), split(b * 2, 0, 8)
    y = a @ b  # here
    return y + 1


@_with(_array(16, 32), _array(32, 16))
def _scattered(a: Any, b: Any) -> Any:
    a, b = split(a * 2, 1, 8), split(b * 2, 0, 8)
    y = split(a @ b, 0, 8)  # here
    return y + 1


@_with(_array(16, 13), _array(13, 24), memory_limit=64)
def _in_a_ring(a: Any, b: Any) -> Any:
    a, b = split(a * 2, 0, 8), split(b * 2, 1, 8)
    y = a @ b  # here
    return split(y, 0, 8) + 1


@_with(_array(13, 6), _array(4, 6, 6))
def _in_a_loop(x: Any, w: Any) -> Any:
    x = split(x * 2, 1, 3)
    y = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0]  # here
    return y + 1


@_with(_array(4, 13, 6))
def _accumulated(x: Any) -> Any:
    x = split(x * 2, 1, 8)
    y = lax.scan(lambda total, x: (total + x.T @ x, None), jnp.zeros((6, 6)), x)[0]  # here
    return y + 1


@_with(_array(13))
def _counted(x: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = jnp.arange(13.0)  # here
    return x + y


@_with(_array(13, 8), _array(8, 6), _array(8, 6))
def _added(x: Any, a: Any, b: Any) -> Any:
    x = split(x * 2, 1, 8)
    y = x @ a + (x + 1) @ b  # here
    return jnp.tanh(y)
