"""Tensors with more rows than what they are made of, where only windows of them are read.

A slope limiter on `q = jnp.pad(u, 2, mode="edge")` computes with rows of `q`, fewer on each level,
and ends with those of `u`. Between are tensors whose tiles begin elsewhere. A window of what is
computed by element is computed from windows of the operands: these are windows of `u` in the end,
with as many rows as it has, and only the rows at the borders of tiles are sent. What several
windows have in common is computed once for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from gshard._jax import Var
from gshard.capture.simplify.painting import painting
from gshard.capture.simplify.row_maps import Origins
from gshard.graph import Graph, at_every_level, live, replacing
from gshard.graph.row_map import Layer, by_rows, through, visible
from gshard.graph.source import source_of
from gshard.rules.base.layers import Layers
from gshard.rules.base.primitives import row_map_p
from gshard.rules.base.rule import RULES, Elementwise
from gshard.tensors.sharding import Sharding

_MOST = 256  # equations more


@at_every_level
def cut_windows(
    jaxpr: Jaxpr, shardings: Mapping[Any, Sharding], memory_limit: int, remarks: list[str]
) -> Jaxpr:
    """The program with windows of such tensors computed by themselves."""
    windows = _Windows(Graph(jaxpr.eqns, jaxpr.outvars), shardings)
    if not windows.large:
        return jaxpr
    eqns = live(list(windows.eqns()), jaxpr.outvars)
    if len(eqns) > len(jaxpr.eqns) + _MOST:
        return jaxpr
    for var in windows.large:
        place = source_of(windows.graph.makers[var])
        remarks.append(f"at {place}: windows of {var.aval.str_short()} are computed by themselves")
    return jaxpr.replace(eqns=eqns)


class _Windows:
    """The tensors of a program of which windows are computed."""

    def __init__(self, graph: Graph, shardings: Mapping[Any, Sharding]):
        self.graph, self.shardings = graph, shardings
        self.maps = Origins(graph).maps
        self.large: dict[Any, None] = {}
        self.made: dict[Layers, Any] = {}  # windows
        for eqn in graph.eqns:
            if _is_by_element(eqn) and any(map(self._grows, eqn.invars)):
                self.large[eqn.outvars[0]] = None
        for eqn in reversed(graph.eqns):
            for var in eqn.outvars:
                if var in self.large and not self._is_read_in_windows(var):
                    del self.large[var]

    def _grows(self, atom: Any) -> bool:
        """Whether an operand has more rows of a split dim than what it is a map of."""
        if isinstance(atom, Literal) or atom in self.large:
            return not isinstance(atom, Literal)
        return any(
            layer.source in self.large
            or any(
                split and m < n
                for split, m, n in zip(
                    self.shardings[layer.source].splits,
                    layer.source.aval.shape,
                    atom.aval.shape,
                    strict=True,
                )
            )
            for layer in self.maps.get(atom, ())
            if not layer.is_constant and layer.is_aligned and layer.source in self.shardings
        )

    def _is_read_in_windows(self, var: Any) -> bool:
        if any(var is a for a in self.graph.results):
            return False
        users = [v for eqn in self.graph.users(var) for v in eqn.outvars]
        return all(v in self.large or self._window(v) is not None for v in users)

    def _window(self, var: Any) -> Layer | None:
        """The window of one tensor that another one is."""
        layers = self.maps.get(var, ())
        runs = len(layers) == 1 and layers[0].is_aligned and all(a.is_run for a in layers[0].axes)
        return layers[0] if runs else None

    def eqns(self) -> Iterator[JaxprEqn]:
        """The equations; nobody reads the large tensors any more."""
        for eqn in self.graph.eqns:
            layer = self._window(eqn.outvars[0]) if len(eqn.outvars) == 1 else None
            if layer is not None and layer.source in self.large:
                yield from self._made(eqn, (layer,), eqn.outvars[0])
            else:
                yield eqn

    def _made(self, eqn: JaxprEqn, layers: Layers, result: Any) -> Iterator[JaxprEqn]:
        """The equations of a result that is painted."""
        layer = layers[0]
        if len(layers) > 1 or layer.is_constant or layer.source not in self.large:
            yield from painting(replacing(eqn, row_map_p, [], result), layers)
            return
        maker, operands = self.graph.makers[layer.source], list[Any]()
        for a in maker.invars:
            if isinstance(a, Literal) or not a.aval.shape:
                operands.append(a)
                continue
            inner = tuple(through(layer, self.maps[a])) if a in self.maps else (layer.of(a),)
            inner = visible(found for own in inner for found in by_rows(own))
            if inner not in self.made:
                self.made[inner] = Var(a.aval.update(shape=result.aval.shape))
                yield from self._made(eqn, inner, self.made[inner])
            operands.append(self.made[inner])
        yield maker.replace(invars=operands, outvars=[result])


def _is_by_element(eqn: JaxprEqn) -> bool:
    """Whether each element is made of those in its place, or of numbers."""
    if not isinstance(RULES.get(eqn.primitive), Elementwise) or len(eqn.outvars) != 1:
        return False
    shape = eqn.outvars[0].aval.shape
    return bool(shape) and all(a.aval.shape in ((), shape) for a in eqn.invars)
