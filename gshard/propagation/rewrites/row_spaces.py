"""Row spaces: what is computed by element is computed in the tiles of those who read it.

`u.at[1:-1].add(u[2:] + u[:-2] - 2 * u[1:-1])` reads and writes windows of `u`. Between them are
tensors with two rows less, whose tiles begin elsewhere: each slice would send rows to these tiles,
and the update would send them back. A slope limiter on `jnp.pad(u, 2)` computes with more rows than
`u` has, fewer on each level. Operators by element commute with windows: a tensor may be computed
with the rows, and in the tiles, of any tensor that it is a window of, or that is a window of it.
From the last row maps on, each asks for what it reads in its own rows; where fewer rows are sent
then, for a group of such operators and all row maps around it, that is where they are computed.
Rows that are too many are garbage, which nobody reads; rows too few make one tensor several, one
for each window of it.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard._jax import Var
from gshard.capture.simplify.painting import painting, viewed
from gshard.capture.simplify.row_maps import Origins, composed
from gshard.graph import Graph, at_every_level, live, replacing
from gshard.graph.row_map import Axis, Layer, entire, through, visible
from gshard.graph.source import source_of
from gshard.propagation import windows
from gshard.propagation.spaces import (
    Place,
    Space,
    bytes_sent,
    extended,
    fits,
    hold_alike,
    of_operand,
    rank,
    shifts,
    window_of,
)  # fmt: skip
from gshard.rules.base.primitives import row_map_p
from gshard.tensors.sharding import Sharding

_MOST = 2048  # tensors in places
_SPREAD = 16  # equations on small tensors that may be computed with all rows of large ones


def choose_row_spaces(
    jaxpr: Jaxpr, shardings: Mapping[Any, Sharding], memory_limit: int, remarks: list[str]
) -> Jaxpr:
    """The program with what is computed by element in the spaces in which the fewest rows move."""
    known = dict(shardings)

    def sent(body: Jaxpr) -> float:
        spaces, _ = _best(body, known)
        return sum(map(spaces.sent, spaces.after.values()))

    return _in_spaces(hold_alike(jaxpr, known, sent, remarks), known, remarks)


@at_every_level
def _in_spaces(jaxpr: Jaxpr, shardings: Mapping[Any, Sharding], remarks: list[str]) -> Jaxpr:
    if not any(_moves_rows(eqn, shardings) for eqn in jaxpr.eqns):
        return jaxpr
    spaces, eqns = _best(jaxpr, shardings)
    if not spaces.places and spaces.origins.known == spaces.origins.maps:  # nothing to compose
        return jaxpr
    remarks += spaces.remarks()
    large = set(spaces.copies.values())

    def near(layer: Layer, result: Any) -> bool:
        here, there = shardings.get(layer.source), shardings.get(result)
        if layer.source in large or not here or not there:
            return layer.source in large
        read = [axis.dim for axis in layer.axes]
        splits = [None if d is None else here.splits[d] for d in read]
        whole = all(d in read or not split for d, split in enumerate(here.splits))
        return whole and splits == [*there.splits] and here.unreduced == there.unreduced

    eqns = live(composed(Graph(eqns, jaxpr.outvars), near), jaxpr.outvars)
    same = len(eqns) == len(jaxpr.eqns) and all(map(operator.is_, eqns, jaxpr.eqns))
    return jaxpr if same else jaxpr.replace(eqns=eqns)


def _best(jaxpr: Jaxpr, shardings: Mapping[Any, Sharding]) -> tuple[_RowSpaces, list[JaxprEqn]]:
    """Where the tensors of a program are computed, and its equations."""
    graph, rejected = Graph(jaxpr.eqns, jaxpr.outvars), set[Any]()
    origins = Origins(graph)
    while True:
        spaces = _RowSpaces(graph, origins, shardings, rejected)
        many = sum(map(len, spaces.places.values())) > _MOST
        eqns = [] if many else live(list(spaces.eqns()), jaxpr.outvars)
        if not (worse := {*spaces.places} if many else spaces.worse()):
            return spaces, eqns
        rejected |= worse


def _moves_rows(eqn: JaxprEqn, shardings: Mapping[Any, Sharding]) -> bool:
    """Whether an equation makes a tensor with other rows of a split dim."""
    if eqn.primitive not in _WINDOWS or isinstance(eqn.invars[0], Literal):
        return False
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    splits = shardings[eqn.invars[0]].splits
    return any(s and n != m for s, n, m in zip(splits, before, after, strict=False))


_WINDOWS = (p.slice_p, p.pad_p, row_map_p)


class _RowSpaces:
    """Where the tensors of a program are computed, and what is sent for them, before and after."""

    def __init__(
        self, graph: Graph, origins: Origins, shardings: Mapping[Any, Sharding], rejected: set[Any]
    ):
        self.graph, self.origins, self.rejected = graph, origins, rejected
        self.splits = {v: here.splits for v, here in shardings.items()}
        self.maps = {
            v: n for v, n in origins.known.items() if not windows.is_by_element(graph.makers[v])
        }
        self.places: dict[Any, list[Place]] = {}
        self.copies: dict[tuple[Any, Place], Any] = {}  # the tensors that are computed there
        self.alone = {a for a in graph.results if not isinstance(a, Literal)}  # read as they are
        self.asked: dict[Any, dict[Place, None]] = {}  # by operands
        self.above: dict[Any, Any] = {}  # the groups of such tensors, as a union of sets
        self.member = self._groups()
        self.sizes = Counter(self.member.values())
        self.homes: dict[Any, Place] = {}
        self.before: Reads = {}
        self.after: Reads = {}
        for eqn in reversed(graph.eqns):
            self._decide(eqn)

    def _groups(self) -> dict[Any, Any]:
        """The groups of tensors of one shape that are computed of each other."""
        eqns = [n for n in self.graph.eqns if windows.is_by_element(n) or windows.has_windows(n)]
        made = {eqn.outvars[0] for eqn in eqns}
        for eqn in filter(windows.is_by_element, eqns):
            for a in windows.tensors(eqn):
                if a in made and a.aval.shape == eqn.outvars[0].aval.shape:
                    self._join(a, eqn.outvars[0])
        return {out: self._group(out) for out in made}

    # ------------------------------------------------------------ who asks for which rows

    def _decide(self, eqn: JaxprEqn) -> None:
        out = eqn.outvars[0] if len(eqn.outvars) == 1 and not eqn.effects else None
        asked = list(self.asked.get(out, ()))
        if out in self.maps:
            for place in asked:
                for layer in self.maps[out]:
                    own = self._place(layer, place, out) or ()
                    if all(space.shared(layer.source.aval.shape[d])[1] for d, space in own):
                        self._ask(layer.source, own, out)  # of which it has some rows
            users = () if out in self.graph.results else self.graph.users(out)
            rows = users and all(map(windows.has_windows, users))  # they fetch what they need
            able = []
            for layer in self.maps[out] if out in self.alone else ():
                there = self._place(layer, (), out)
                if rows and not all(space.is_border for _, space in there or ()):
                    there = None  # only few rows at a border are computed in the tile of others
                able.append(self._ask(layer.source, there, out))
            if out in self.alone and not any(able):
                self.alone.update(windows.tensors(eqn))  # it stays as it is
            return
        by_element = windows.is_by_element(eqn)
        if asked and out is not None and (by_element or windows.has_windows(eqn)):
            places = self._chosen(asked, out)
            runs = by_element or windows.can_run(eqn, places, self.splits)
            if runs and (out not in self.alone or all(fits(out, place) for place in places)):
                self.places[out] = places
                others = (a for a in eqn.invars if not (by_element and a.aval.shape))
                self.alone.update(a for a in others if not isinstance(a, Literal))
                for a in windows.tensors(eqn) if by_element else ():
                    for place in places:
                        self._ask(a, of_operand(a, out, place), out)
                return
        if out is None or asked or out in self.alone:
            self.alone.update(a for a in eqn.invars if not isinstance(a, Literal))

    def _ask(self, source: Any, place: Place | None, out: Any) -> bool:
        """Ask for a tensor in a place; as it is, where it has none or no dim that has."""
        if place:
            self.asked.setdefault(source, {})[place] = None
            self._join(source, out)
        elif not isinstance(source, Literal):  # a number, too
            self.alone.add(source)
        return bool(place)

    def _place(self, layer: Layer, place: Place, out: Any) -> Place | None:
        """Where the rows of a layer's source are in a space in which there are those of `out`."""
        source, spaces, found = layer.source, dict(place), dict[int, Space]()
        maker = None if layer.is_constant or source in self.rejected else self.graph.maker(source)
        able = maker is not None and (windows.is_by_element(maker) or windows.has_windows(maker))
        if not able or not (layer.is_aligned or viewed(layer)):
            return None
        for d, split in enumerate(self.splits[out]):
            axis, size = layer.axes[d], out.aval.shape[d]
            if axis.dim is None:  # a dim of one row
                continue
            n = source.aval.shape[axis.dim]
            own = Space(size, 0, 1, split, 0, size) if split else None
            space = spaces.get(d, own)
            if space is None or n == space.size:
                continue
            step, rest = divmod(space.step * axis.step, axis.stride)
            if rest or step < 1:
                return None
            at = space.first + space.step * axis.at
            space = space._replace(first=at - step * layer.base[axis.dim], step=step)
            if step == 1 and not space.is_border and space.has_at_border(axis, at):
                space = space._replace(low=at, high=at + axis.rows)
            elif not space.is_border and not self._is_most(axis, n, space, source):
                return None
            found[axis.dim] = space
        return tuple(found.items()) or None

    def _is_most(self, axis: Axis, rows: int, space: Space, source: Any) -> bool:
        """Whether most rows of a source are most rows of a space, or it is easily computed."""
        size, many = space.size, self.sizes[self.member[source]] > _SPREAD
        halves = size < 4 * rows * space.step < 3 * size  # which are no borders
        most = 4 * axis.rows >= 3 * min(rows, size // space.step)
        return most and not halves and not (many and 2 * rows < size)

    def _chosen(self, asked: Sequence[Place], var: Any) -> list[Place]:
        """One place for a group, of those with all rows of its tensors; all of other places.

        It is the one between the others: rows are shifted least.
        """
        kinds: dict[Any, list[Place]] = {}
        for place in asked:
            kinds.setdefault(tuple((d, s._replace(first=0)) for d, s in place), []).append(place)
        whole = {kind: own for kind, own in kinds.items() if all(fits(var, p) for p in own)}
        for kind, places in whole.items():
            if (key := (self.member[var], kind)) not in self.homes:
                self.homes[key] = sorted(places, key=shifts)[(len(places) - 1) // 2]
        return [self.homes[self.member[var], kind] for kind in whole] or list(asked)

    def _join(self, one: Any, other: Any) -> None:
        self.above[self._group(one)] = self._group(other)

    def _group(self, var: Any) -> Any:
        while (above := self.above.get(var, var)) is not var:
            self.above[var] = self.above.get(above, above)
            var = above
        return var

    # ------------------------------------------------------------ the equations

    def eqns(self) -> Iterator[JaxprEqn]:
        """The equations, with such tensors in their places; small ones are windows of these."""
        for eqn in self.graph.eqns:
            out = eqn.outvars[0] if len(eqn.outvars) == 1 else None
            if out in self.places:
                yield from self._computed(eqn, out)
            elif out in self.maps and (out in self.alone or out in self.asked):
                layers = self.maps[out]
                self._reads(self.before, out, layers, out)
                if out not in self.alone:
                    continue
                gone = any(a in self.maps and a not in self.alone for a in windows.tensors(eqn))
                if gone or any(n.source in self.places for n in layers if not n.is_constant):
                    layers = tuple(max(self._options(n), key=rank) for n in layers)
                    yield from painting(replacing(eqn, row_map_p, [], out), layers)
                else:
                    yield eqn
                self._reads(self.after, out, layers, out)
            else:
                yield eqn

    def _computed(self, eqn: JaxprEqn, out: Any) -> Iterator[JaxprEqn]:
        for place in self.places[out]:
            if windows.has_windows(eqn):
                copy = self._copy(out, place)
                yield from windows.in_place(eqn, place, copy, functools.partial(self._painted, eqn))
                continue
            operands = []
            for a in eqn.invars:
                if not isinstance(a, Literal) and a.aval.shape:
                    there = of_operand(a, out, place)
                    if (a, there) not in self.copies:
                        yield from self._placed(eqn, a, there)
                    a = self.copies[a, there]
                operands.append(a)
            yield eqn.replace(invars=operands, outvars=[self._copy(out, place)])
        if out in self.alone:
            layer = max(self._options(entire(out, out.aval.shape)), key=rank)
            self._reads(self.after, out, [layer], out)
            yield from painting(eqn, [layer])

    def _copy(self, var: Any, place: Place) -> Any:
        """A variable for a tensor in a place."""
        shape, splits = list(var.aval.shape), list(self.splits[var])
        for d, space in place:
            shape[d], splits[d] = space.held, space.split
        copy = self.copies[var, place] = Var(var.aval.update(shape=tuple(shape)))
        self.splits[copy] = tuple(splits)
        return copy

    def _placed(self, eqn: JaxprEqn, a: Any, place: Place) -> Iterator[JaxprEqn]:
        """The equations of an operand in the rows of a place."""
        if not place:
            self.copies[a, place] = a
            return
        copy, layers = self._copy(a, place), () if a in self.places else self.maps.get(a, ())
        found = []
        for layer in layers or (entire(a, a.aval.shape),):
            options = [m for n in self._options(layer) for m in extended(n, place, a.aval.shape)]
            if options:
                found.append(max(options, key=lambda each: (each[0], rank(each[1])))[1])
        self._reads(self.after, a, found, copy)
        shape, found = copy.aval.shape, list(visible(found))
        if len(found) == 1 and found[0].is_all(shape) and found[0].source.aval.shape == shape:
            self.copies[a, place] = found[0].source
        else:
            yield from windows.filled(eqn, copy, found)

    def _painted(self, eqn: JaxprEqn, result: Any, layers: Sequence[Layer]) -> Iterator[JaxprEqn]:
        """The equations of rows under the windows of a border."""
        if (source := layers[0].source) in self.splits:
            self.splits.setdefault(result, self.splits[source])
            found = through(layers[0], self.maps[source]) if source in self.maps else layers
            layers = [max(self._options(n), key=rank) for n in found]
            self._reads(self.after, eqn.outvars[0], layers, result)
        yield from windows.filled(eqn, result, layers)

    def _options(self, layer: Layer) -> Iterator[Layer]:
        """A layer in terms of each of the tensors that are computed in the place of its source."""
        if layer.is_constant or layer.source not in self.places:
            yield layer
            return
        for place in self.places[layer.source]:
            copy = self.copies[layer.source, place]
            yield from through(layer, [window_of(copy, place, layer.source)])

    # ------------------------------------------------------------ what is sent

    def _reads(self, reads: Reads, var: Any, layers: Sequence[Layer], result: Any) -> None:
        """Note the rows that a tensor reads, in the account of the group of `var`."""
        for layer in layers:
            if layer.size and not layer.is_constant:
                key = (layer.source, result.aval.shape, self.splits[result])
                reads.setdefault(self._group(var), {}).setdefault(key, []).append(layer)

    def worse(self) -> set[Any]:
        """The tensors that are better computed as they are."""
        groups = {
            group
            for group in {self._group(var) for var in self.places}
            if self.sent(self.after.get(group, {})) >= self.sent(self.before.get(group, {}))
        }
        return {var for var in self.places if self._group(var) in groups}

    def sent(self, reads: Mapping[Any, Sequence[Layer]]) -> float:
        """The bytes of the rows that a device sends for such windows."""
        return sum(
            bytes_sent(source, self.splits[source], layers, shape, splits)
            for (source, shape, splits), layers in reads.items()
        )

    def remarks(self) -> list[str]:
        """What is computed elsewhere."""
        found = []
        for var, (place, *more) in self.places.items():
            rows = ", ".join(f"{space.size} rows of dim {d}" for d, space in place)
            where = source_of(self.graph.makers[var])
            times = f", {1 + len(more)} times" if more else ""
            found.append(f"at {where}: {var.aval.str_short()} is computed with {rows}{times}")
        return list(dict.fromkeys(reversed(found)))


Reads = dict[Any, dict[Any, list[Layer]]]  # by groups, and by sources, shapes and splits
