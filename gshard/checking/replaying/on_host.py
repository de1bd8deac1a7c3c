"""Floats as devices have them: operators on one CPU device, for each device in turn."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as p

from gshard._jax import without_mesh
from gshard.checking.replaying.collectives import Sizes, rank_in, run_collective
from gshard.graph.caching import cached
from gshard.graph.evaluate import bind
from gshard.tensors.devices import lookup_p

Tiles = list[Any]  # an entry for each device; None for one that does not run there

KEPT = 400  # compiled operators: XLA needs 1.4 MB for each, and a training step has thousands


class OnHost:
    """Runs equations on the host; equal operators and types share their compiled function."""

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


class OnEach:
    """Values as lists with an entry for each device: the domain of a replay."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.on_host = OnHost()

    def literal(self, value: Any, active: np.ndarray) -> Tiles:
        """A constant."""
        return [value if on else None for on in active]

    def row(self, value: Tiles, number: int) -> Tiles:
        """A row of a tensor."""
        return [None if x is None else x[number] for x in value]

    def stacked(self, rows: list[Tiles], aval: Any) -> Tiles:
        """The tensor of some rows."""
        if not rows:
            return [jnp.zeros(aval.shape, aval.dtype)] * self.count
        columns = zip(*rows, strict=True)
        return [None if c[0] is None else jnp.stack([jnp.asarray(x) for x in c]) for c in columns]

    def on(self, value: Tiles, devices: np.ndarray) -> Tiles:
        """A value on some devices alone."""
        return [x if on else None for x, on in zip(value, devices, strict=True)]

    def merged(self, new: Tiles, old: Tiles | None, devices: np.ndarray) -> Tiles:
        """The new value where there is one, else the old one."""
        return (
            new if old is None else [o if n is None else n for n, o in zip(new, old, strict=True)]
        )

    def numbers(self, value: Tiles, count: int) -> np.ndarray:
        """An integer of each device; 0 where it does not run."""
        return np.asarray([0 if x is None else int(x) for x in value])

    def collective(self, eqn: JaxprEqn, operands: Sequence[Tiles], sizes: Sizes) -> list[Tiles]:
        """The results of a collective, or the number of every device."""
        if eqn.primitive is p.axis_index_p:
            return [[jnp.asarray(n, jnp.int32) for n in rank_in(eqn, sizes)]]
        return run_collective(eqn, operands, sizes)

    def local(self, eqn: JaxprEqn, operands: Sequence[Tiles], active: np.ndarray) -> list[Tiles]:
        """The results of an equation that sends nothing; equal operands give results once."""
        results: list[Tiles] = [[None] * len(active) for _ in eqn.outvars]
        known: dict[tuple[int, ...], Sequence[Any]] = {}
        for device in np.flatnonzero(active):
            own = [value[device] for value in operands]
            key = tuple(map(id, own))
            if key not in known or eqn.effects:
                known[key] = self._evaluate(eqn, own)
            for result, array in zip(results, known[key], strict=True):
                result[device] = array
        return results

    def _evaluate(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        if eqn.primitive is lookup_p:
            return [jnp.asarray(eqn.params["table"].rows[int(values[0])])]
        return self.on_host(eqn, values)
