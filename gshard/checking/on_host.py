"""JAX's own operators on one CPU device, for each device in turn: floats as devices have them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
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
    """The results of an equation on the active devices; once if all have the same operands.

    Devices that have floats run one after the other, so that each has the bits of its own.
    """
    if eqn.primitive is lookup_p:
        return [eqn.params["table"].rows[operands[0]]]
    types = [a.aval.dtype for a in eqn.invars]

    def run(*own: Any) -> list[Any]:
        # An argument on a mesh of explicit axes leaves it in the context; here is one device.
        with eqn.ctx.manager, without_mesh():
            made = bind(eqn, list(map(_typed, own, types)))
        return [jax.random.key_data(x) if is_key(x) else x for x in made]

    if eqn.effects:
        on = np.flatnonzero(active)
        rows = [
            on_all((eqn, 1), run, [x[d : d + 1] if len(x) > 1 else x for x in operands]) for d in on
        ]
        return [
            np.concatenate(x)[np.maximum(np.cumsum(active) - 1, 0)] for x in zip(*rows, strict=True)
        ]
    of_floats = any(jnp.issubdtype(a.aval.dtype, jnp.inexact) for a in (*eqn.invars, *eqn.outvars))
    return on_all((eqn,), run, operands, _one_by_one if of_floats else jax.vmap)


def _one_by_one(function: Callable[..., Any], axes: Sequence[int | None]) -> Callable[..., Any]:
    """As `vmap` of a function that cannot be batched, or has to have the bits of each device."""

    def run(*given: Any) -> Any:
        pairs = [(x, axis is not None) for x, axis in zip(given, axes, strict=True)]
        rows = jnp.arange(next(len(x) for x, is_mapped in pairs if is_mapped))
        return jax.lax.map(lambda d: function(*(x[d] if own else x for x, own in pairs)), rows)

    return run


def on_all(
    key: Any,
    function: Callable[..., list[Any]],
    operands: Sequence[np.ndarray],
    each: Callable[..., Any] = jax.vmap,
) -> list[np.ndarray]:
    """The results of a function of what one device has, on all devices at once.

    Functions with equal keys, which may have an equation, are the same.
    """
    axes = [0 if len(x) > 1 else None for x in operands]
    key = tuple(signature(k) if isinstance(k, JaxprEqn) else k for k in (*key, tuple(axes)))
    given = [x if axis == 0 else x[0] for x, axis in zip(operands, axes, strict=True)]
    batched = each(function, axes) if 0 in axes else function
    with without_mesh(), jax.default_device(host()):
        made = map(np.asarray, _compiled_for(key, batched)(*given))
    return [x if 0 in axes else x[None] for x in made]


def _compiled_for(key: Hashable, function: Callable[..., Any]) -> Callable[..., Any]:
    _compiled[key] = found = _compiled.pop(key, None) or jax.jit(function)
    if len(_compiled) > KEPT:
        del _compiled[next(iter(_compiled))]
    return found


def _typed(array: Any, dtype: Any) -> Any:
    if is_key_type(dtype):
        return jax.random.wrap_key_data(array, impl=prng_impl(dtype).name)
    return array.astype(dtype)


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
