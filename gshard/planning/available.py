"""Values available during planning: under which shardings, and how to recompute them.

A rule that asks for a tensor under some sharding gets an existing copy if there is one: the tensor
as it was resharded for another operator, a transpose of that, or the tensor it was sliced from. The
body of a loop may use what is available outside: that is moved once, before the loop.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jax import lax
from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as p

from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import Identity, Tile

VIEWS = (p.transpose_p, p.rev_p)


@dataclass(frozen=True)
class View:
    """A tensor that is `source` with its dims permuted by `order`, and some `reversed`."""

    source: Tile
    order: tuple[int, ...]
    reversed: tuple[int, ...]

    def is_local(self, sharding: Sharding) -> bool:
        """Whether it is computed locally from its source: no reversed dim is split."""
        return not any(sharding.splits[d] for d in self.reversed)


@dataclass
class Available:
    """Values under their available shardings, views of others, and equations that made them."""

    moved: dict[tuple[Identity, Sharding], Tile] = field(default_factory=dict)
    forms: dict[Identity, list[Sharding]] = field(default_factory=dict)
    views: dict[Identity, View] = field(default_factory=dict)
    makers: dict[Identity, tuple[JaxprEqn, list[Tile]]] = field(default_factory=dict)

    def inner(self) -> Available:
        """What is available at the start of a body; what the body adds stays inside."""
        forms = {array: list(found) for array, found in self.forms.items()}
        return Available(dict(self.moved), forms, dict(self.views))

    def under(self, tile: Tile, target: Sharding) -> Tile | None:
        """`tile` under another sharding, if available."""
        key = (Identity(tile.array), target)
        if key not in self.moved and (made := self._view_of_moved(tile, target)):
            self.moved[key] = made
        return self.moved.get(key)

    def moved_to(self, tile: Tile, target: Sharding) -> Tile | None:
        """`tile` under another sharding, if it was resharded itself, not through a view."""
        return self.moved.get((Identity(tile.array), target))

    def add(self, tile: Tile, moved: Tile) -> None:
        """Remember that a tensor has been moved."""
        key = Identity(tile.array)
        self.forms.setdefault(key, []).append(moved.sharding)
        self.moved[key, moved.sharding] = moved
        if tile.sharding.is_replicated:  # a slice of it need not be gathered again
            self.moved.setdefault((Identity(moved.array), tile.sharding), tile)

    def add_made(self, tile: Tile, made: Tile) -> None:
        """Remember a tensor that was recomputed under another sharding."""
        self.moved[Identity(tile.array), made.sharding] = made

    def add_view(self, eqn: JaxprEqn, result: Tile, source: Tile) -> None:
        """Remember a transpose or a reversal, and its inverse."""
        order = tuple(eqn.params.get("permutation", range(len(source.shape))))
        back = tuple(order.index(d) for d in range(len(order)))
        turned = tuple(eqn.params.get("dimensions", ()))
        self.views[Identity(result.array)] = View(source, order, turned)
        self.views.setdefault(Identity(source.array), View(result, back, turned))

    def add_maker(self, result: Tile, eqn: JaxprEqn, operands: list[Tile]) -> None:
        """Remember how integers were computed."""
        self.makers[Identity(result.array)] = (eqn, operands)

    def maker(self, tile: Tile) -> tuple[JaxprEqn, list[Tile]] | None:
        """The equation that computed integers, and its operands."""
        return self.makers.get(Identity(tile.array))

    def forms_of(self, tile: Tile) -> frozenset[Sharding]:
        """The shardings under which `tile` is available."""
        known = frozenset(self.forms.get(Identity(tile.array), ()))
        if view := self.views.get(Identity(tile.array)):
            forms = self.forms.get(Identity(view.source.array), ())
            known |= {f for form in forms if view.is_local(f := form.project(view.order))}
        return known

    def _view_of_moved(self, tile: Tile, target: Sharding) -> Tile | None:
        view = self.views.get(Identity(tile.array))
        if view is None or target.manual or not view.is_local(target):
            return None
        back = [view.order.index(d) for d in range(len(view.order))]
        moved = self.moved.get((Identity(view.source.array), target.project(back)))
        if moved is None:
            return None
        array: Any = lax.transpose(moved.array, view.order)
        array = lax.rev(array, view.reversed) if view.reversed else array
        return Tile(array, target, tile.shape)
