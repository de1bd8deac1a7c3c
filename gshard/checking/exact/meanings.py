"""Operators that are written out: as programs of operators that the field has, on one device."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun
from jax.extend.core.primitives import scatter_p

from gshard._jax import gamma_one, ragged_dot_dense, without_mesh
from gshard.checking.exact.number import is_float
from gshard.checking.on_host import signature
from gshard.graph.windows import convolution, fourier, window_places, window_sum

Params = dict[str, Any]
Operator = Callable[..., Any]


def _best(q: Params, x: jax.Array) -> jax.Array:
    """For each window, the number of its first largest or smallest element among all of `x`; -1 for
    a window that has none."""
    largest = q["select_prim"].name in ("ge", "gt")
    places = jnp.stack(window_places(q, x, -np.inf if largest else np.inf))
    numbers = jnp.arange(x.size, dtype=jnp.int32).reshape(x.shape)
    among = jnp.stack(window_places(q, numbers, -1))
    first = (jnp.argmax if largest else jnp.argmin)(places, 0)
    return jnp.take_along_axis(among, first[None], 0)[0]


def _select_and_scatter_add(q: Params, source: jax.Array, x: jax.Array) -> jax.Array:
    """The gradient of pooling: cotangents go where the largest element was."""
    zeros = jnp.zeros(x.size + 1, source.dtype)
    return zeros.at[_best(q, x).ravel()].add(source.ravel())[:-1].reshape(x.shape)


def _select_and_gather_add(q: Params, tangents: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.append(tangents.ravel(), 0)[_best(q, x)]


def _reduce(q: Params, *xs: jax.Array, there: Any = True) -> Sequence[jax.Array]:
    """A reduction by a function, row by row; of the rows that are `there`."""
    arrays, starts = xs[: len(xs) // 2], xs[len(xs) // 2 :]
    dims = q["dimensions"]
    count = math.prod(arrays[0].shape[d] for d in dims)
    rows = [jnp.moveaxis(x, dims, range(len(dims))) for x in arrays]
    rows = [x.reshape(count, *x.shape[len(dims) :]) for x in rows]
    closed = q["jaxpr"] if "consts" not in q else ClosedJaxpr(q["jaxpr"], q["consts"])
    combine: Any = jaxpr_as_fun(closed)
    for _ in rows[0].shape[1:]:
        combine = jax.vmap(combine)

    def next_row(found: Any, row: Any) -> tuple[Any, None]:
        row, there = row
        pairs = zip(combine(*found, *row), found, strict=True)
        return [jnp.where(there, both, before) for both, before in pairs], None

    wide = [jnp.broadcast_to(s, x.shape[1:]) for s, x in zip(starts, rows, strict=True)]
    return lax.scan(next_row, wide, (rows, jnp.broadcast_to(there, rows[0].shape)))[0]


def _reduce_window(q: Params, *xs: jax.Array) -> Sequence[jax.Array]:
    """XLA reduces the elements of a window: padding and holes do not count, whatever the start."""
    arrays, starts = xs[: len(xs) // 2], xs[len(xs) // 2 :]
    windows = [jnp.stack(window_places(q, x, s)) for x, s in zip(arrays, starts, strict=True)]
    there = jnp.stack(window_places(q, jnp.ones(arrays[0].shape, bool), False))
    return _reduce({**q, "dimensions": (0,)}, *windows, *starts, there=there)


def _fourier(q: Params, x: jax.Array) -> jax.Array:
    """Transforms of one dim after the other, each a product with the transforms of unit vectors."""
    if len(q["fft_lengths"]) > 1:
        return fourier(q, x)
    kind, units = lax.FftType(q["fft_type"]), np.eye(x.shape[-1])
    transform: Operator = getattr(np.fft, kind.name.lower())
    parts: list[Any] = [(x, units)]
    if kind is lax.FftType.IRFFT:  # linear in the parts of complex numbers
        parts = [(lax.real(x), units), (lax.imag(x), units * 1j)]
    return sum(part @ jnp.asarray(transform(u, *q["fft_lengths"])) for part, u in parts)


def _power(q: Params, x: jax.Array) -> jax.Array:
    """By squares, as JAX does it."""
    y, found = abs(q["y"]), jnp.ones_like(x)
    while y:
        found, x, y = found * x if y % 2 else found, x * x if y > 1 else x, y // 2
    return found if q["y"] >= 0 else 1 / found


def _scatter_apply(q: Params, x: jax.Array, indices: jax.Array, new: jax.Array) -> jax.Array:
    """A function of elements, of each as often as an index names it."""
    combine: Any = jaxpr_as_fun(ClosedJaxpr(q["update_jaxpr"], q["update_consts"]))
    for _ in x.shape:
        combine = jax.vmap(combine, (0, None))
    how = {k: v for k, v in q.items() if k not in ("update_jaxpr", "update_consts")}
    zeros, ones = jnp.zeros(x.shape, jnp.int32), jnp.ones(new.shape, jnp.int32)

    def again(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        left, x = state
        return left - 1, jnp.where(left > 0, combine(x, jnp.zeros((), x.dtype))[0], x)

    times = lax.scatter_add(zeros, indices, ones, **how)
    return lax.while_loop(lambda state: (state[0] > 0).any(), again, (times, x))[1]


def _gamma(q: Params, keys: jax.Array, alpha: jax.Array) -> jax.Array:
    """A key of its own for every element, which draws until a number is accepted."""
    own = jax.vmap(lambda key: jax.random.split(key, alpha.size // keys.size))(keys.ravel())
    one = functools.partial(gamma_one, log_space=q["log_space"])
    return jax.vmap(one)(own.ravel(), alpha.ravel()).reshape(alpha.shape)


def _cumulative(combine: Operator) -> Operator:
    return lambda q, x: lax.associative_scan(combine, x, reverse=q["reverse"], axis=q["axis"])


MEANINGS: dict[str, Operator] = {
    "conv_general_dilated": convolution,
    "reduce": _reduce,
    "scatter": _scatter_apply,
    "reduce_window": _reduce_window,
    "reduce_window_sum": window_sum,
    "reduce_window_max": lambda q, x: jnp.stack(window_places(q, x, -np.inf)).max(0),
    "reduce_window_min": lambda q, x: jnp.stack(window_places(q, x, np.inf)).min(0),
    "select_and_scatter_add": _select_and_scatter_add,
    "select_and_gather_add": _select_and_gather_add,
    "random_gamma": _gamma,
    "ragged_dot_general": lambda q, *xs: ragged_dot_dense(*xs, **q),
    "fft": _fourier,
    "cumprod": _cumulative(lax.mul),
    "cummax": _cumulative(lax.max),
    "cummin": _cumulative(lax.min),
    "integer_pow": _power,
    "square": lambda q, x: x * x,
    "rem": lambda q, a, b: a - b * jnp.trunc(a / b),
    "expm1": lambda q, x: lax.sub(lax.exp(x), jnp.ones_like(x)),
    "log1p": lambda q, x: lax.log(lax.add(x, jnp.ones_like(x))),
}  # fmt: skip
_written: dict[Hashable, ClosedJaxpr] = {}


def written_out(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The program that an equation stands for; None for operators that the field has."""
    meaning = MEANINGS.get(eqn.primitive.name)
    known = any(is_float(v.aval.dtype) for v in eqn.outvars)  # JAX can do that to integers
    if eqn.primitive is scatter_p:
        known = eqn.params["update_jaxpr"] is not None
    if meaning is None or not known:
        return None
    key = signature(eqn)
    if key not in _written:
        types = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in eqn.invars]
        with eqn.ctx.manager, without_mesh():
            _written[key] = jax.make_jaxpr(lambda *xs: meaning(eqn.params, *xs))(*types)
    return _written[key]
