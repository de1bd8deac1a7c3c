"""JAX's own operators on one CPU device, for each device in turn: floats as devices have them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from gshard._jax import prng_impl, without_mesh
from gshard.graph.caching import cached
from gshard.graph.evaluate import bind
from gshard.tensors.devices import lookup_p
from gshard.tensors.keys import is_key, is_key_type

KEPT = 400  # compiled operators: XLA needs 1.4 MB for each, and a training step has thousands
_compiled: dict[Hashable, Callable[..., Any]] = {}  # the last one was used last


def on_each(eqn: JaxprEqn, operands: Sequence[np.ndarray], active: np.ndarray) -> list[np.ndarray]:
    """The results of an equation on the active devices; once if all have the same operands."""
    if eqn.primitive is lookup_p:
        return [eqn.params["table"].rows[operands[0]]]
    count = max(map(len, operands), default=1)
    count = len(active) if eqn.effects else count
    rows: list[Any] = [None] * count
    for device in range(count):
        if count == 1 or active[device]:
            own = [x[device if len(x) > 1 else 0] for x in operands]
            given = [_typed(x, a.aval.dtype) for x, a in zip(own, eqn.invars, strict=True)]
            rows[device] = [_integers(x) for x in _run(eqn, given)]
    some = next(row for row in rows if row is not None)
    rows = [[np.zeros_like(x) for x in some] if row is None else row for row in rows]
    return [np.stack(column) for column in zip(*rows, strict=True)]


def _run(eqn: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
    # An argument on a mesh of explicit axes leaves it in the context; here is one device.
    with eqn.ctx.manager, without_mesh(), jax.default_device(host()):
        if eqn.effects:
            try:
                return bind(eqn, values)
            except NotImplementedError:  # JAX runs this primitive in compiled programs alone
                pass
        return _compiled_for(signature(eqn), lambda *xs: list(bind(eqn, xs)))(*values)


def on_all(
    key: Any, function: Callable[..., list[Any]], operands: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """The results of a function of what one device has, on all devices at once.

    Functions with equal keys, which may have an equation, are the same.
    """
    axes = [0 if len(x) > 1 else None for x in operands]
    key = tuple(signature(k) if isinstance(k, JaxprEqn) else k for k in (*key, tuple(axes)))
    given = [x if axis == 0 else x[0] for x, axis in zip(operands, axes, strict=True)]
    batched = jax.vmap(function, axes) if 0 in axes else function
    with without_mesh(), jax.default_device(host()):
        made = map(np.asarray, _compiled_for(key, batched)(*given))
    return [x if 0 in axes else x[None] for x in made]


def _compiled_for(key: Hashable, function: Callable[..., Any]) -> Callable[..., Any]:
    _compiled[key] = found = _compiled.pop(key, None) or jax.jit(function)
    if len(_compiled) > KEPT:
        del _compiled[next(iter(_compiled))]
    return found


def _typed(array: np.ndarray, dtype: Any) -> Any:
    if is_key_type(dtype):
        return jax.random.wrap_key_data(array, impl=prng_impl(dtype).name)
    return array.astype(dtype)


def _integers(value: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(value) if is_key(value) else value)


def signature(eqn: JaxprEqn) -> Hashable:
    """What equations have in common that compute the same; the equation if that is not known."""
    types = tuple((a.aval.shape, a.aval.dtype) for a in eqn.invars)  # a mesh is none of it
    key = (eqn.primitive, tuple(eqn.params.items()), types)
    try:
        hash(key)
    except TypeError:
        return eqn
    return key


@cached
def host() -> jax.Device:
    """The device that local work is done on."""
    return jax.local_devices(backend="cpu")[0]
