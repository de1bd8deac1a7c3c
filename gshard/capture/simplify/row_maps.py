"""Row maps: operators whose result is made of rows of their operands, composed into one.

In a slice, a pad, a concatenation, a `split`, an update at a constant index and the sum of disjoint
zero-padded tensors, rows i..j of the result along one dim are rows a..b of an operand. Compositions
of row maps are row maps too. A roll is two slices concatenated; separately, each slice would be
redistributed over all devices. As one operator (`concatenate_slices`), only the rows that cross
from one tile to the next are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.extend.core import JaxprEqn, Literal, Primitive
from jax.extend.core import primitives as p

from gshard._jax import Var, split_p
from gshard.capture.simplify.passes import in_every_body
from gshard.graph import Graph, filling, replacing
from gshard.rules.base.primitives import concatenate_slices_p


@dataclass(frozen=True)
class Rows:
    """Rows `start` to `limit` of `source`, or that many rows of a constant `fill`.

    A source may lack dims of size 1 that the result has: those `inserted`.
    """

    source: Any
    start: int
    limit: int
    fill: bool = False
    inserted: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """How many."""
        return self.limit - self.start

    def part(self, first: int, end: int) -> Rows:
        """Some of these rows, counted from the first of them."""
        if self.fill:
            return replace(self, start=0, limit=end - first)
        return replace(self, start=self.start + first, limit=self.start + end)

    @property
    def is_made(self) -> bool:
        """Whether they are created here: a repeated constant, or a tensor that lacks dims."""
        return self.fill or bool(self.inserted)

    @property
    def is_zero(self) -> bool:
        """Whether they are known to be zero."""
        return self.fill and isinstance(self.source, Literal) and self.source.val == 0


Pieces = tuple[Rows, ...]
RowMap = tuple[int | None, Pieces]  # along a dim; along any dim where all of a tensor is kept


@in_every_body
def compose_row_maps(graph: Graph) -> list[JaxprEqn]:
    """The equations with compositions of row maps merged.

    What only other compositions read is not composed itself: in a chain of updates, the last is.
    """
    origins = _Origins(graph)
    needed = {a for a in graph.results if not isinstance(a, Literal)}
    composed: list[JaxprEqn] = []
    for eqn in reversed(graph.eqns):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            made = _composed(eqn, origins)
            needed |= {a for e in made for a in e.invars if not isinstance(a, Literal)}
            composed += reversed(made)
    return composed[::-1]


def _composed(eqn: JaxprEqn, origins: _Origins) -> list[JaxprEqn]:
    dim, pieces = (len(eqn.outvars) == 1 and origins.maps.get(eqn.outvars[0])) or (None, ())
    if dim is None:
        return [eqn]
    resolved = origins.resolved(pieces, dim)
    if resolved == pieces and eqn.primitive in _PLAIN:
        return [eqn]
    if eqn.primitive in _MOVING and not _is_shift(resolved, dim):
        return [eqn]
    return _concatenation(eqn, dim, resolved)


_PLAIN = (p.concatenate_p, p.slice_p, p.pad_p, concatenate_slices_p)
_MOVING = (p.slice_p, p.pad_p)
_SUMS = (p.add_p, p.add_jaxvals_p)


def _is_shift(pieces: Pieces, dim: int) -> bool:
    """Whether a slice or pad keeps most rows of one tensor, and fills the others with a number."""
    kept = [rows for rows in pieces if not rows.fill]
    if len(kept) != 1 or kept[0].inserted:  # a source that lacks dims is no tensor of these rows
        return False
    return 0 < kept[0].source.aval.shape[dim] <= 2 * kept[0].count


class _Origins:
    """The tensors that rows of a program come from, through all row maps between."""

    def __init__(self, graph: Graph):
        self.maps = {
            v: found
            for eqn in graph.eqns
            if eqn.primitive in _MAPS
            for v in eqn.outvars
            if (found := _MAPS[eqn.primitive](eqn, v, graph))
        }
        self.known: dict[tuple[Any, int], Pieces | None] = {}
        for var, (dim, _) in self.maps.items():  # in order: a long chain is no deep recursion
            if dim is not None:
                self.of_tensor(var, dim)

    def resolved(self, pieces: Pieces, dim: int) -> Pieces:
        """Pieces in terms of their sources' origins, where most of each source is used.

        A tensor of which little is used is better sliced first: less is sent.
        """
        origins = [tuple(self.of_rows(rows, dim)) for rows in pieces]
        used: dict[Any, int] = {}
        for rows in (r for found in origins for r in found if not r.is_made):
            used[rows.source] = used.get(rows.source, 0) + rows.count
        resolved: list[Rows] = []
        for rows, found in zip(pieces, origins, strict=True):
            mostly = all(r.is_made or 2 * used[r.source] >= r.source.aval.shape[dim] for r in found)
            resolved += found if mostly else [rows]
        return tuple(resolved)

    def of_rows(self, rows: Rows, dim: int) -> Iterator[Rows]:
        """Rows as rows of tensors that are not row maps along `dim` themselves."""
        pieces = None if rows.is_made else self.of_tensor(rows.source, dim)
        if pieces is None:
            yield rows
            return
        first = 0
        for piece in pieces:
            end = first + piece.count
            if rows.start <= first and end <= rows.limit:
                yield piece
            elif rows.start < end and first < rows.limit:
                yield piece.part(max(rows.start, first) - first, min(rows.limit, end) - first)
            first = end

    def of_tensor(self, source: Any, dim: int) -> Pieces | None:
        """The origins of a tensor along `dim`; None if it is not a row map."""
        if isinstance(source, Literal):
            return None
        if (source, dim) not in self.known:
            along, pieces = self.maps.get(source, (None, None))
            if pieces is not None and along in (dim, None):
                pieces = tuple(r for piece in pieces for r in self.of_rows(piece, dim))
            self.known[source, dim] = pieces if along in (dim, None) else None
        return self.known[source, dim]


# ---------------------------------------------------------------- row maps of equations


def _of_concatenate(eqn: JaxprEqn, result: Any, graph: Graph) -> RowMap:
    dim = eqn.params["dimension"]
    return dim, tuple(Rows(a, 0, a.aval.shape[dim]) for a in eqn.invars)


def _of_slices(eqn: JaxprEqn, result: Any, graph: Graph) -> RowMap:
    windows = eqn.params["windows"]
    return eqn.params["dimension"], tuple(Rows(eqn.invars[n], a, b) for n, a, b in windows)


def _of_split(eqn: JaxprEqn, result: Any, graph: Graph) -> RowMap:
    number = next(i for i, v in enumerate(eqn.outvars) if v is result)
    sizes = eqn.params["sizes"]
    before = int(sum(sizes[:number]))
    return eqn.params["axis"], (Rows(eqn.invars[0], before, before + int(sizes[number])),)


def _of_slice(eqn: JaxprEqn, result: Any, graph: Graph) -> RowMap | None:
    if any(s != 1 for s in eqn.params["strides"] or ()):
        return None
    (source,) = eqn.invars
    bounds = zip(
        eqn.params["start_indices"], eqn.params["limit_indices"], source.aval.shape, strict=True
    )
    cut = [(d, int(a), int(b)) for d, (a, b, n) in enumerate(bounds) if (a, b) != (0, n)]
    if not cut:
        return None, (Rows(source, 0, _EVERY_ROW),)
    if len(cut) > 1:
        return None
    ((dim, start, limit),) = cut
    return dim, (Rows(source, start, limit),)


def _of_pad(eqn: JaxprEqn, result: Any, graph: Graph) -> RowMap | None:
    config = [tuple(map(int, c)) for c in eqn.params["padding_config"]]
    padded = [d for d, c in enumerate(config) if c != (0, 0, 0)]
    operand, value = eqn.invars
    if not padded:
        return None, (Rows(operand, 0, _EVERY_ROW),)
    if len(padded) != 1 or config[padded[0]][2]:
        return None
    (dim,) = padded
    low, high, _ = config[dim]
    rows = operand.aval.shape[dim]
    pieces = (
        Rows(value, 0, max(low, 0), fill=True),
        Rows(operand, max(-low, 0), rows - max(-high, 0)),
        Rows(value, 0, max(high, 0), fill=True),
    )
    return dim, tuple(piece for piece in pieces if piece.count > 0)


def _of_update(eqn: JaxprEqn, result: Any, graph: Graph) -> RowMap | None:
    """A scatter that sets one window at a constant index, smaller than the operand in one dim."""
    operand, indices, update = eqn.invars
    numbers, shape = eqn.params["dimension_numbers"], operand.aval.shape
    sizes = list(update.aval.shape)
    if len(numbers.update_window_dims) != len(sizes) or numbers.operand_batching_dims:
        return None
    if eqn.params["update_jaxpr"] is not None:  # the update is combined with the old value
        return None
    for dim in numbers.inserted_window_dims:
        sizes.insert(dim, 1)
    begins = graph.constant(indices)
    dims = [d for d, (n, m) in enumerate(zip(shape, sizes, strict=True)) if n != m]
    if begins is None or len(dims) != 1:
        return None
    starts = dict(zip(numbers.scatter_dims_to_operand_dims, begins.tolist(), strict=True))
    (dim,) = dims
    at = starts.pop(dim, 0)
    if any(starts.values()) or not 0 <= at <= shape[dim] - sizes[dim]:
        return None
    after = at + sizes[dim]
    pieces = (
        Rows(operand, 0, at),
        Rows(update, 0, sizes[dim], inserted=tuple(numbers.inserted_window_dims)),
        Rows(operand, after, shape[dim]),
    )
    return dim, tuple(piece for piece in pieces if piece.count > 0)


def _of_sum(eqn: JaxprEqn, result: Any, graph: Graph) -> RowMap | None:
    """The sum of zero-padded tensors that do not overlap.

    JAX's gradient of a roll, and of rows that are taken one by one.
    """
    terms = None if _is_term(result, graph) else _zero_padded(result, graph)
    if terms is None:
        return None
    (dim, *others), rows = {d for d, _, _ in terms}, result.aval.shape
    terms = sorted(terms, key=lambda term: term[1])
    ends = [0, *(at + piece.count for _, at, piece in terms)]
    if others or ends[-1] != rows[dim] or any(a != b[1] for a, b in zip(ends, terms, strict=False)):
        return None
    return dim, tuple(piece for _, _, piece in terms)


def _is_term(atom: Any, graph: Graph) -> bool:
    """Whether a sum is a term of a longer sum, which is matched instead."""
    users = graph.users(atom)
    if len(users) != 1 or users[0].primitive not in _SUMS:
        return False
    makers = [graph.maker(a) for a in users[0].invars if a is not atom]
    return all(maker is not None and maker.primitive is p.pad_p for maker in makers)


def _zero_padded(atom: Any, graph: Graph) -> list[tuple[int, int, Rows]] | None:
    """The terms of a sum of zero-padded rows: the rows, their dim and their offsets.

    None if the sum has any other term.
    """
    terms, left = [], [atom]
    while left:
        maker = graph.maker(left.pop())
        if maker is not None and maker.primitive in _SUMS:
            left += maker.invars
            continue
        padded = _of_pad(maker, None, graph) if maker and maker.primitive is p.pad_p else None
        dim, pieces = padded or (None, ())
        kept = [i for i, rows in enumerate(pieces) if not rows.is_zero]
        if dim is None or len(kept) != 1 or pieces[kept[0]].fill or len(pieces) < 2:
            return None
        terms.append((dim, sum(rows.count for rows in pieces[: kept[0]]), pieces[kept[0]]))
    return terms


_EVERY_ROW = 1 << 60  # along any dim: only the consumer's bounds matter

# Finds the dim along which an equation maps rows to one of its results, and their origins.
_MAPS: dict[Primitive, Callable[[JaxprEqn, Any, Graph], RowMap | None]] = {
    p.concatenate_p: _of_concatenate,
    concatenate_slices_p: _of_slices,
    split_p: _of_split,
    p.slice_p: _of_slice,
    p.pad_p: _of_pad,
    p.scatter_p: _of_update,
    **dict.fromkeys(_SUMS, _of_sum),
}


# ---------------------------------------------------------------- the equation of a row map


def _concatenation(eqn: JaxprEqn, dim: int, pieces: Sequence[Rows]) -> list[JaxprEqn]:
    """The equations that make the result of `eqn` from these pieces."""
    before: list[JaxprEqn] = []
    operands: list[Any] = []
    numbers: dict[Any, int] = {}
    windows: list[tuple[int, int, int]] = []
    for rows in pieces:
        source = rows.source
        if rows.is_made:
            made = _as_rows(eqn, rows, dim)
            before.append(made)
            source = made.outvars[0]
        number = numbers.setdefault(source, len(operands))
        if number == len(operands):
            operands.append(source)
        windows.append((number, rows.start, rows.limit))
    params = {"dimension": dim, "windows": tuple(windows)}
    return [*before, eqn.replace(invars=operands, primitive=concatenate_slices_p, params=params)]


def _as_rows(eqn: JaxprEqn, rows: Rows, dim: int) -> JaxprEqn:
    """The equation that makes rows of a constant, or of a tensor that lacks dims."""
    aval, source = eqn.outvars[0].aval, rows.source
    shape = list(source.aval.shape)
    for inserted in rows.inserted:
        shape.insert(inserted, 1)
    if rows.fill:
        shape = [*aval.shape[:dim], rows.limit, *aval.shape[dim + 1 :]]
    made = Var(aval.update(shape=tuple(shape), weak_type=source.aval.weak_type))
    if rows.fill:
        return filling(eqn, source, made)
    params = {"new_sizes": tuple(shape), "dimensions": None, "sharding": None}
    return replacing(eqn, p.reshape_p, [source], made, **params)
