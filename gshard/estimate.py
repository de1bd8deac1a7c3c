"""What a program would cost under given shardings: the sum over its operators of what they send.

The same costs by which the partitioner chooses how an operator runs (`choose`), with trip counts.
A value that several operators need in one form is moved once. Layers that look alike are counted
once and multiplied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.extend.core import Literal

from gshard.choose import choose, local_work, shard_dims
from gshard.flow import Edge, Flow
from gshard.moving.partial import combine_cost
from gshard.moving.plan import reshard_cost
from gshard.sharding import Sharding

Key = Any
Kind = tuple[Edge, tuple[bool, ...]]  # an operator, and which operands it is the first to use


class Estimator:
    """The cost of a program, for one assignment of shardings after another."""

    def __init__(self, flow: Flow, signature: Callable[[Any], Key]):
        """`signature` tells variables apart that may get different shardings."""
        self.flow = flow
        self.costs: dict[Key, float] = {}
        self.kinds: dict[Key, list[Any]] = {}  # of operators: an example, and how often it runs
        used: set[Any] = set()
        for edge in flow.edges:
            atoms = edge.atoms[0]
            fresh = tuple(not isinstance(a, Literal) and a not in used for a in atoms)
            if edge.eqn is not None:
                used.update(a for a in atoms if not isinstance(a, Literal))
            key = (_described(edge), fresh, *map(signature, edge.atoms[0] + edge.atoms[1]))
            kind = self.kinds.setdefault(key, [(edge, fresh), 0])
            kind[1] += edge.runs

    def cost(self, sharding_of: Callable[[Any], Sharding]) -> float:
        """The bytes that a device sends, and the time of its work as bytes."""
        total = 0.0
        for (described, fresh, *_), ((edge, _), runs) in self.kinds.items():
            shardings = [self._of(a, sharding_of) for a in edge.atoms[0]]
            targets = [self._of(a, sharding_of) for a in edge.atoms[1]]
            key = (described, fresh, *shardings, *targets)
            if key not in self.costs:
                self.costs[key] = _edge_cost(edge, fresh, shardings, targets)
            total += self.costs[key] * runs
        return total

    def _of(self, atom: Any, sharding_of: Callable[[Any], Sharding]) -> Sharding:
        if isinstance(atom, Literal):
            return Sharding.replicated(len(atom.aval.shape), self.flow.num_devices)
        return sharding_of(atom)


def _described(edge: Edge) -> Key:
    """All that the cost of an operator depends on, but for the shardings."""
    factors, eqn = edge.factors, edge.eqn
    avals = tuple((a.aval.shape, a.aval.dtype) for a in edge.atoms[0] + edge.atoms[1])
    return (
        eqn.primitive if eqn else None,
        avals,
        factors.operands,
        factors.results,
        tuple(factors.reduced.items()),
        factors.whole,
    )


def _edge_cost(
    edge: Edge, fresh: tuple[bool, ...], shardings: list[Sharding], targets: list[Sharding]
) -> float:
    factors, eqn = edge.factors, edge.eqn
    if eqn is None:  # the border of a loop
        (outside,), (inside,) = shardings, targets
        more = outside.rank - inside.rank
        wanted = Sharding((*(None,) * more, *inside.splits), inside.num_devices)
        (aval,) = (a.aval for a in edge.atoms[0])
        return reshard_cost(outside, wanted, aval.shape, aval.dtype)
    if not targets:
        return 0.0
    chosen = choose(eqn, factors, shardings, targets)
    total = local_work(eqn, factors, chosen)
    num_devices = targets[0].num_devices
    for atom, dims, here, first in zip(eqn.invars, factors.operands, shardings, fresh, strict=True):
        if first:
            wanted = shard_dims(dims, chosen, factors, num_devices)
            total += reshard_cost(here, wanted, atom.aval.shape, atom.aval.dtype)
    reduced = {f: s for f, s in chosen.items() if s and f in factors.reduced}
    for var, dims, target in zip(eqn.outvars, factors.results, targets, strict=True):
        here = shard_dims(dims, chosen, factors, num_devices)
        total += combine_cost(here, reduced, factors.reduced, target, var.aval)
    return total
