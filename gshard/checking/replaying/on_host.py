"""Operators on one CPU device, one at a time, with a bounded number of compiled programs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from gshard._jax import without_mesh
from gshard.graph.caching import cached
from gshard.graph.evaluate import bind

KEPT = 400  # compiled operators: XLA needs 1.4 MB for each, and a training step has thousands


class OnHost:
    """Runs equations on the host. Those with equal operators and types share what is compiled."""

    def __init__(self) -> None:
        self._compiled: dict[Hashable, Callable[..., Any]] = {}  # the last one was used last

    def __call__(self, eqn: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
        """The results of an equation."""
        # An argument on a mesh of explicit axes leaves it in the context; here is one device.
        with eqn.ctx.manager, without_mesh(), jax.default_device(host()):
            if eqn.effects:
                try:
                    return bind(eqn, values)
                except NotImplementedError:  # JAX runs this primitive in compiled programs alone
                    pass
            return self._function(eqn)(*values)

    def _function(self, eqn: JaxprEqn) -> Callable[..., Any]:
        key = _signature(eqn)
        found = self._compiled.pop(key, None)
        if found is None:
            found = jax.jit(lambda *xs: list(bind(eqn, xs)))
        self._compiled[key] = found
        if len(self._compiled) > KEPT:
            del self._compiled[next(iter(self._compiled))]
        return found


def _signature(eqn: JaxprEqn) -> Hashable:
    """What equations have in common that compute the same; the equation if that is not known."""
    key = (eqn.primitive, tuple(eqn.params.items()), tuple(a.aval for a in eqn.invars))
    try:
        hash(key)
    except TypeError:
        return eqn
    return key


@cached
def host() -> jax.Device:
    """The device that local work is done on."""
    return jax.local_devices(backend="cpu")[0]
