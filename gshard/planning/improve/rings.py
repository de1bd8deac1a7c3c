"""A gather and its products, or a product and its scatter, as a ring of permutes.

Gather, then product: a device multiplies the tile that it has while the tiles of its neighbours are
under way, in both directions. Product, then ReduceScatter: partial sums go around the ring, and
each device adds its own part; one half of the rows goes in each direction. Both send what the
collective sends. Unlike pieces (`chains`), nothing is exposed at the beginning or the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from gshard.graph import Graph, inputs_of
from gshard.graph.evaluate import bind
from gshard.graph.schedule import Dependence
from gshard.moving.collectives import collective_permute
from gshard.moving.nodes import node_of
from gshard.moving.partial import Reduce, scatter_groups
from gshard.moving.plan import Reshard, plan_reshard
from gshard.moving.steps import gather_groups
from gshard.planning.improve.cuts import Cut, cuts_of
from gshard.tensors.devices import Groups, Place
from gshard.tensors.factors import Shape
from gshard.tensors.sharding import Sharding

_LARGEST = 8  # devices in a ring: in larger ones a tile's product is small


@dataclass(frozen=True, eq=False)
class Ring:
    """A node, and the products next to it, with the dim of each that the node gathers or scatters.

    `dims` has for each product the number of the operand, its dim, and that of the result. Where
    others read what is gathered, it is `assembled` too.
    """

    node: JaxprEqn
    products: tuple[JaxprEqn, ...]
    dims: tuple[tuple[int, int, int], ...]
    groups: Groups
    gathers: bool
    assembled: bool = False

    @property
    def members(self) -> list[JaxprEqn]:
        """The equations that it replaces, in the order of the program."""
        return [self.node, *self.products] if self.gathers else [*self.products, self.node]

    @property
    def size(self) -> int:
        """How many devices it has."""
        return len(self.groups[0])

    @property
    def operands(self) -> list[Any]:
        """What it reads: the node's device number, and the operands of its members."""
        return inputs_of(self.members)

    @property
    def results(self) -> list[Any]:
        """What others read of it."""
        made = [e.outvars[0] for e in self.products] if self.gathers else []
        return [*made, *self.node.outvars] if self.assembled or not self.gathers else made

    def run(self, *values: jax.Array) -> list[jax.Array]:
        """Its results, of the values of `operands`: equations of a plan when traced."""
        known = dict(zip(self.operands, values, strict=True))
        device = known[self.node.invars[1]]
        count = sum(map(len, self.groups))
        ranks = np.zeros(count, np.int32)
        for group in self.groups:
            ranks[list(group)] = np.arange(len(group))
        place = Place((), count, {"id": device})
        rank = jnp.asarray(place.lookup(ranks), jnp.int32)
        if self.gathers:
            return self._gathered(place, rank, known)
        return [self._scattered(place, rank, known)]

    def _gathered(self, place: Place, rank: Any, known: dict[Any, Any]) -> list[jax.Array]:
        """The products of each tile, at its place in the results."""
        own = known[self.node.invars[0]]
        tiles = [(own, rank)]
        ahead = behind = own
        for step in range(1, self.size // 2 + 1):
            ahead = self._shift(place, ahead, 1)
            tiles.append((ahead, rank - step))
            if step <= (self.size - 1) // 2:
                behind = self._shift(place, behind, -1)
                tiles.append((behind, rank + step))
        starts = [part % self.size for _, part in tiles]
        found = []
        for product, (number, _, dim) in zip(self.products, self.dims, strict=True):
            made = [_with_operand(product, number, tile, known) for tile, _ in tiles]
            found.append(_assembled(made, starts, dim))
        if self.assembled:
            found.append(_assembled([tile for tile, _ in tiles], starts, self.dims[0][1]))
        return found

    def _scattered(self, place: Place, rank: Any, known: dict[Any, Any]) -> jax.Array:
        """This device's part of the sum; each half of its rows is summed in its own direction."""
        (product,), ((number, inside, dim),) = self.products, self.dims
        rows = product.outvars[0].aval.shape[dim] // self.size
        halves = (rows,) if rows % 2 else (rows // 2, rows // 2)
        summed, first = [], 0
        for by, count in zip((1, -1), halves, strict=False):
            total = None
            for step in range(1, self.size + 1):
                start = (rank - by * step) % self.size * rows + first
                part = lax.dynamic_slice_in_dim(known[product.invars[number]], start, count, inside)
                made = _with_operand(product, number, part, known)
                total = made if total is None else self._shift(place, total, by) + made
            assert total is not None
            summed.append(total)
            first += count
        return summed[0] if len(summed) == 1 else jnp.concatenate(summed, axis=dim)

    def _shift(self, place: Place, x: jax.Array, by: int) -> jax.Array:
        """What the member of the ring has that is `by` places before."""
        node = node_of(self.node)
        assert node is not None
        reason = replace(node.reason, pieces=self.size).then(f"a ring of {self.size} devices")
        pairs = sorted(
            (device, group[(number + by) % len(group)])
            for group in self.groups
            for number, device in enumerate(group)
        )
        return collective_permute(place, x, pairs, reason)


def _with_operand(product: JaxprEqn, number: int, x: Any, known: dict[Any, Any]) -> Any:
    """A product with another value of one of its operands."""
    values = [a.val if isinstance(a, Literal) else known.get(a) for a in product.invars]
    values[number] = x
    return bind(product, values)[0]


def _assembled(parts: Sequence[jax.Array], numbers: Sequence[Any], dim: int) -> jax.Array:
    """An array of equal parts, each at the place that its number says."""
    shape, rows = list(parts[0].shape), parts[0].shape[dim]
    shape[dim] *= len(parts)
    result = jnp.zeros(shape, parts[0].dtype)
    for part, number in zip(parts, numbers, strict=True):
        result = lax.dynamic_update_slice_in_dim(result, part, number * rows, dim)
    return result


def rings(graph: Graph, order: Dependence[JaxprEqn]) -> Iterator[Ring]:
    """All gathers and scatters of a program that can be rings."""
    for eqn in graph.eqns:
        node = node_of(eqn)
        if isinstance(node, Reshard):
            found = _gathering(graph, order, eqn, node)
        elif isinstance(node, Reduce):
            found = _scattering(graph, eqn, node)
        else:
            found = None
        if found is not None and found.size <= _LARGEST:
            yield found


def _gathering(
    graph: Graph, order: Dependence[JaxprEqn], eqn: JaxprEqn, node: Reshard
) -> Ring | None:
    """A gather of one dim, with the products that read it and do not sum over it."""
    value, (result,) = eqn.invars[0], eqn.outvars
    if not _is_plain(node.shape, node.sharding, node.target, value):
        return None
    steps = plan_reshard(node.sharding, node.target, node.shape, value.aval.dtype)
    if [step.kind for step in steps] != ["gather"]:
        return None
    dim, groups = gather_groups(node.sharding, node.target)
    products: dict[JaxprEqn, tuple[int, int, int]] = {}
    for user in graph.users(result):
        places = [i for i, a in enumerate(user.invars) if a is result]
        cuts = cuts_of(user, {result: Cut(dim)}, len(groups[0])) if _is_dot(user) else None
        alone = cuts is not None and len(places) == 1 and cuts.operands[1 - places[0]] is None
        # Those of the backward pass come later: they read what is assembled.
        late = any(order.needs(a, e) for e in products for a in user.invars)
        if cuts is not None and alone and not late:
            products[user] = (places[0], dim, cuts.results[0].dim)
    if not products:
        return None
    others = graph.uses(result) > len(products)
    return Ring(eqn, tuple(products), tuple(products.values()), groups, True, others)


def _scattering(graph: Graph, eqn: JaxprEqn, node: Reduce) -> Ring | None:
    """A ReduceScatter of a product that nothing else reads."""
    value = eqn.invars[0]
    product, scatter = graph.maker(value), node.scatter
    if scatter is None or node.kind != "sum" or product is None or not _is_dot(product):
        return None
    if graph.uses(value) != 1 or not _is_plain(
        node.shape, node.sharding.reduced, node.target, value
    ):
        return None
    within, across = scatter_groups(node.sharding, scatter.result)
    if len(within[0]) != scatter.parts or len(across[0]) != 1:
        return None
    cuts = cuts_of(product, {value: Cut(scatter.dim)}, scatter.parts)
    found = [(n, cut) for n, cut in enumerate(cuts.operands) if cut] if cuts else []
    if len(found) != 1:
        return None  # a batch dim is one of both operands
    ((number, cut),) = found
    return Ring(eqn, (product,), ((number, cut.dim, scatter.dim),), within, False)


def _is_plain(shape: Shape, source: Sharding, target: Sharding, value: Any) -> bool:
    """Whether every device takes part, with tiles of one size and no padding."""
    even = source.is_even(shape) and target.is_even(shape)
    local = value.aval.shape == source.local_shape(shape)
    return even and local and not (source.idle or target.idle)


def _is_dot(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "dot_general"
