"""Points at which programs are compared: the user's values, or random ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gshard._jax import prng_impl
from gshard.checking.exact import field
from gshard.checking.exact.number import Exact, Value, by_parts, constant, drawn, is_float
from gshard.checking.replaying.emitted import Emitted
from gshard.checking.tiles import logical
from gshard.tensors.keys import is_key_type


def at_values(emitted: Emitted, arguments: Sequence[Any]) -> Iterator[list[Value]]:
    """The user's arguments, with random elements of the field."""
    for seed in itertools.count():
        rng = np.random.default_rng(seed)
        values = map(logical, (*emitted.consts, *arguments))
        yield [drawn(x, rng) for x in values]


def at_random(emitted: Emitted, given: Sequence[Any] = ()) -> Iterator[list[Value]]:
    """Random numbers of the arguments' types; constants that the function closes over stay.

    Integers are taken from what is `given`, where that has arrays of their shapes.
    """
    variables = emitted.unpartitioned.jaxpr.invars
    for seed in itertools.count():
        rng = np.random.default_rng(seed)
        own = [drawn(x, rng) for x in map(logical, emitted.consts)]
        arguments = itertools.zip_longest(variables[len(own) :], given)
        yield own + [_random(v.aval, x, rng) for v, x in arguments]


def _random(aval: Any, given: Any, rng: np.random.Generator) -> Value:
    if is_float(aval.dtype):
        shape = (1, *aval.shape)
        f = rng.normal(size=shape)
        if jnp.issubdtype(aval.dtype, jnp.complexfloating):
            f = f + 1j * rng.normal(size=shape)
        draw = lambda _: rng.integers(0, field.P, shape, np.uint64)  # noqa: E731
        return Exact(f, **by_parts(draw, Exact(f, f, f)))
    if hasattr(given, "__array__") and given.shape == aval.shape:
        return constant(logical(given))
    if is_key_type(aval.dtype):
        key = jax.random.key(rng.integers(2**31), impl=prng_impl(aval.dtype).name)
        return constant(jax.random.split(key, aval.shape) if aval.shape else key)
    if np.dtype(aval.dtype).kind == "b":
        return rng.integers(0, 2, (1, *aval.shape)).astype(bool)
    # Rows that are looked up should exist; a scalar may be where a slice begins.
    most = 4 if aval.shape else 2 ** rng.integers(8)
    return constant(rng.integers(0, most, aval.shape).astype(aval.dtype))
