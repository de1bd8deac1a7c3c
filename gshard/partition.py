"""The partitioner: an interpreter that runs each equation on tiles (section 3.3).

It runs while `shard_map` traces it, so what it executes on local arrays becomes the one program of
all devices. Each operator's rule is ordinary `lax` code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from gshard.choose import partition_by_factors
from gshard.devices import Place
from gshard.moving import reshard
from gshard.rules import RULES
from gshard.rules.manual import CROSSING_MANUAL, check_manual, run_manually
from gshard.rules.unknown import unknown_rule
from gshard.sharding import Sharding
from gshard.source import on_behalf_of
from gshard.tile import Tile


def partition(
    jaxpr: Jaxpr, shardings: Mapping[Any, Sharding], memory_limit: int, strict: bool = False
) -> Callable[[Place, Sequence[Tile]], list[Tile]]:
    """The per-device program: from tiles of its constants and arguments to tiles of its results."""

    def local(place: Place, tiles: Sequence[Tile]) -> list[Tile]:
        return Partitioner(place, shardings, memory_limit, strict).run(jaxpr, tiles)

    return local


class Partitioner:
    """Runs a program on tiles, with the shardings that propagation found."""

    def __init__(
        self,
        place: Place,
        shardings: Mapping[Any, Sharding],
        memory_limit: int,
        strict: bool = False,
    ):
        self.place = place
        self.shardings = shardings
        self.memory_limit = memory_limit
        self.strict = strict  # whether a primitive without a rule is an error
        self.resharded: dict[tuple[int, Sharding], tuple[Tile, Tile]] = {}

    def inner(self) -> Partitioner:
        """A partitioner for a body: it may use what is known outside, but not leak what it adds."""
        inner = Partitioner(self.place.inner(), self.shardings, self.memory_limit, self.strict)
        inner.resharded = dict(self.resharded)
        return inner

    def sharding(self, var: Any) -> Sharding:
        """The sharding that propagation gave `var`."""
        return self.shardings[var]

    def reshard(self, tile: Tile, target: Sharding, reason: str) -> Tile:
        """`tile` under another sharding; asking twice moves it once."""
        if tile.sharding == target and tile.is_standard:
            return tile
        key = (id(tile.array), target)
        if key not in self.resharded:
            moved = reshard.reshard(self.place, tile, target, reason)
            self.resharded[key] = (tile, moved)  # the tile is kept, so that its id stays its own
        return self.resharded[key][1]

    def retile(self, tile: Tile, dim: int, size: int, reason: str) -> Tile:
        """`tile` with tiles of `size` rows along `dim`, which need not be the usual."""
        return reshard.retile(self.place, tile, dim, size, reason)

    def run_body(self, closed: ClosedJaxpr, tiles: Sequence[Tile]) -> list[Tile]:
        """The results of a body; its constants are whole on every device."""
        return self.run(closed.jaxpr, [*map(self.whole, closed.consts), *tiles])

    def run(self, jaxpr: Jaxpr, tiles: Sequence[Tile]) -> list[Tile]:
        """The results of a program, given tiles for its constants and its arguments."""
        env: dict[Any, Tile] = dict(zip((*jaxpr.constvars, *jaxpr.invars), tiles, strict=True))

        def read(atom: Any) -> Tile:
            return self.whole(atom.val) if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            with on_behalf_of(eqn):
                results = self.equation(eqn, [read(a) for a in eqn.invars])
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(a) for a in jaxpr.outvars]

    def equation(self, eqn: JaxprEqn, tiles: list[Tile]) -> list[Tile]:
        """The results of one equation, on tiles."""
        targets = [self.sharding(v) for v in eqn.outvars]
        if any(t.sharding.manual for t in tiles) and eqn.primitive not in CROSSING_MANUAL:
            results = run_manually(self, eqn, tiles)
        else:
            rule = RULES.get(eqn.primitive) or unknown_rule(eqn, self.strict)
            if rule.partition:
                results = rule.partition(self, eqn, tiles, targets)
            else:
                results = partition_by_factors(self, eqn, rule, tiles, targets)
        for result, target in zip(results, targets, strict=True):
            check_manual(eqn, result, target)
        return [
            self.reshard(r, t, f"result of {eqn.primitive.name}")
            for r, t in zip(results, targets, strict=True)
        ]

    def whole(self, value: Any) -> Tile:
        """A constant, which every device has."""
        array = value if isinstance(value, jax.Array) else jnp.asarray(value)
        return Tile(
            array, Sharding.replicated(jnp.ndim(array), self.place.num_devices), jnp.shape(array)
        )
