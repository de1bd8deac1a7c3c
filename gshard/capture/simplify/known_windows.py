"""Gathers and scatters at known places: indices that are constants, or are computed of none.

`x.at[1:-1, ::2]` reads or writes a window whose place is known when the program is made, but JAX
computes its indices at run time: as a constant index of one large window, or as an `iota` of many
small ones. So is `x[(i + 1) % n]`, where `i` counts up. Where the numbers along each dim are a few
runs, windows of rows are read or written.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal
from jax.extend.core import primitives as p
from jax.lax import GatherScatterMode

from gshard._jax import Var, scatter_sub_p
from gshard.capture.simplify.painting import painting
from gshard.graph import Graph, replacing
from gshard.graph.evaluate import bind
from gshard.graph.row_map import Axis, Layer, constant
from gshard.moving.reductions import identity
from gshard.rules.base.primitives import row_map_p
from gshard.rules.base.rule import RULES, Elementwise
from gshard.rules.indexing import Roles, roles_of


class _Run(NamedTuple):
    """Indices from the one at `at` on: so many, from `start` on, `step` apart."""

    at: int
    rows: int
    start: int
    step: int


_FEW_RUNS = 8  # windows of one gather or scatter
_MANY = 2**24  # indices that are computed to find runs


def gathered(eqn: JaxprEqn, graph: Graph) -> tuple[Layer, ...] | None:
    """What a gather reads, if its indices are known."""
    operand, shape, layers = eqn.invars[0], eqn.outvars[0].aval.shape, list[Layer]()
    for window in _windows(eqn, operand.aval.shape, shape, graph):
        axes = [Axis(0, n) for n in shape]
        for d, (to, run) in enumerate(window):
            if to is not None:
                axes[to] = Axis(run.at, run.rows, d, 1, run.step)
        layers.append(Layer(operand, tuple(run.start for _, run in window), tuple(axes)))
    return tuple(layers) or None


def scattered(eqn: JaxprEqn, graph: Graph) -> tuple[Layer, ...] | None:
    """The windows that a scatter writes, in the operand's coordinates, if its indices are known."""
    operand, updates = eqn.invars[0].aval.shape, eqn.invars[2]
    shape, layers = updates.aval.shape, list[Layer]()
    for window in _windows(eqn, operand, shape, graph):
        base, axes = [0] * len(shape), []
        for to, (at, rows, start, step) in window:
            if to is not None:
                base[to] = at if step > 0 else at + rows - 1
            first = min(start, start + step * (rows - 1))
            axes.append(Axis(first, rows, to, abs(step), 1 if step > 0 else -1))
        if any(n > 1 for d, n in enumerate(shape) if d not in {to for to, _ in window}):
            return None  # one row is written several times
        layers.append(Layer(updates, tuple(base), tuple(axes)))
    return tuple(layers) or None


def _windows(
    eqn: JaxprEqn, operand: Sequence[int], windows: Sequence[int], graph: Graph
) -> Iterator[Sequence[tuple[int | None, _Run]]]:
    """For each dim of the operand, the indices of a window, and the dim of `windows` they are in.

    There are none if indices are not known, out of bounds, or about one dim of `windows` twice.
    """
    roles = roles_of(eqn)
    parts = None if 0 in windows else _components(eqn.invars[1], roles, graph)
    found = list[list[tuple[int | None, _Run]]]()
    if parts is None:
        return
    for d, n in enumerate(operand):
        most, numbers = n - roles.sizes[d], parts.get(d, _NONE)
        if eqn.params["mode"] is GatherScatterMode.CLIP:
            numbers = np.clip(numbers, 0, most)
        along = [k for k, count in enumerate(numbers.shape) if count > 1]
        moves, names = len(along) == 1 and roles.sizes[d] == 1, (f"w{d}", f"o{d}", roles.operand[d])
        if numbers.min() < 0 or numbers.max() > most or (along and not moves):
            return
        wanted = (roles.indices[along[0]],) if along else names
        to = next((k for k, name in enumerate(roles.windows) if name in wanted), None)
        rows = 1 if to is None else windows[to]
        runs = _runs(numbers.reshape(-1)) if along else [_Run(0, rows, int(numbers.flat[0]), 1)]
        found.append([(to, run) for run in runs])
    used = [runs[0][0] for runs in found if runs and runs[0][0] is not None]
    if len(set(used)) == len(used) and math.prod(map(len, found)) <= _FEW_RUNS:
        yield from itertools.product(*found) if found else ()


_NONE = np.zeros((), np.int64)


def _components(indices: Any, roles: Roles, graph: Graph) -> dict[int, np.ndarray] | None:
    """The numbers along each indexed dim; one where those along a dim of the indices are equal."""
    if not roles.index_map:
        return {}
    numbers, seen = list[np.ndarray](), dict[Any, Any]()
    for part in _parts(indices, graph):
        known = known_numbers(part, graph, seen)
        if known is None:
            return None
        numbers += [known[..., k] for k in range(known.shape[-1])]
    return {d: _distinct(x) for d, x in zip(roles.index_map, numbers, strict=True)}


def _parts(indices: Any, graph: Graph) -> Sequence[Any]:
    """The components of indices, or several in one."""
    maker, last = graph.maker(indices), len(indices.aval.shape) - 1
    if maker is None or maker.primitive is not p.concatenate_p:
        return [indices]
    return maker.invars if maker.params["dimension"] == last else [indices]


def _runs(numbers: np.ndarray) -> list[_Run]:
    """Indices as runs with a constant step; nothing if they are many."""
    found, at = list[_Run](), 0
    borders = np.flatnonzero(np.diff(numbers, n=2)) + 1  # where the step changes
    while at < len(numbers):
        step = int(numbers[at + 1]) - int(numbers[at]) if at + 1 < len(numbers) else 0
        behind = borders[np.searchsorted(borders, at, side="right") :]
        count = int(behind[0]) + 1 - at if len(behind) else len(numbers) - at
        if step == 0 or (count == 2 and len(behind) and abs(step) > 1):
            count, step = 1, 1  # a row by itself
        found.append(_Run(at, count, int(numbers[at]), step))
        at += count
        if len(found) > _FEW_RUNS:
            return []
    return found


# ---------------------------------------------------------------- numbers that are known

_DEPTH = 32  # operators that an index is computed by
_BY_ELEMENT: dict[Any, Callable[..., Any]] = {  # the usual ones, without a compiler
    p.add_p: np.add, p.sub_p: np.subtract, p.mul_p: np.multiply, p.lt_p: np.less,
    p.select_n_p: lambda which, no, yes: np.where(which, yes, no),
}  # fmt: skip
_MOVING = (p.reshape_p, p.squeeze_p, p.concatenate_p, p.rev_p, p.slice_p)
_COUNTING = (p.iota_p, p.broadcast_in_dim_p, *_MOVING)


def known_numbers(
    atom: Any, graph: Graph, seen: dict[Any, Any] | None = None, depth: int = _DEPTH
) -> np.ndarray | None:
    """Numbers that are computed of no input; None if they are not known.

    Where all rows of a dim are equal by construction, its stride is zero: they are one in memory.
    """
    if isinstance(atom, Literal):
        return np.asarray(atom.val, atom.aval.dtype)
    if atom in graph.known:
        return np.asarray(graph.known[atom])
    seen = {} if seen is None else seen
    if atom not in seen:
        eqn, seen[atom] = graph.maker(atom), None
        if eqn is None or eqn.effects or not depth:
            return None
        if eqn.primitive in _COUNTING or isinstance(RULES.get(eqn.primitive), Elementwise):
            operands = [known_numbers(a, graph, seen, depth - 1) for a in eqn.invars]
            if all(o is not None and o.size for o in operands):
                seen[atom] = _computed(eqn, operands)
    return seen[atom]


def _computed(eqn: JaxprEqn, operands: list[Any]) -> np.ndarray | None:
    """The numbers that an equation computes of known ones."""
    aval, kind = eqn.outvars[0].aval, eqn.primitive
    if kind is p.iota_p:
        numbers, rest = np.arange(aval.shape[eqn.params["dimension"]]), [*range(len(aval.shape))]
        rest.remove(eqn.params["dimension"])
        numbers = np.expand_dims(numbers, rest)
    elif kind is p.broadcast_in_dim_p:
        new = set(range(len(aval.shape))).difference(eqn.params["broadcast_dimensions"])
        numbers = np.expand_dims(operands[0], sorted(new))
    elif kind in _MOVING:
        if aval.size > _MANY:
            return None
        numbers = _bound(eqn, operands)
    else:
        operands = [_once(x) for x in operands]
        if math.prod(np.broadcast_shapes(*(x.shape for x in operands))) > _MANY:
            return None
        compute = _BY_ELEMENT.get(kind)
        same = operands if compute else np.broadcast_arrays(*operands)
        numbers = compute(*same) if compute else _bound(eqn, same)
    return np.broadcast_to(numbers.astype(aval.dtype, copy=False), aval.shape)


def _bound(eqn: JaxprEqn, operands: Sequence[np.ndarray]) -> np.ndarray:
    with jax.ensure_compile_time_eval():
        (numbers,) = bind(eqn, operands)
        return np.asarray(numbers)


def _once(x: Any) -> Any:
    """Numbers without the repetitions that are one in memory."""
    return x[tuple(slice(None, None if stride else 1) for stride in x.strides)]


def _distinct(x: Any) -> Any:
    """Numbers with one row for dims along which they are equal, if they differ along several."""
    x = _once(x)
    for d in range(x.ndim if sum(n > 1 for n in x.shape) > 1 else 0):
        x = first if np.array_equal(x, np.broadcast_to(first := x.take([0], d), x.shape)) else x
    return x


# ---------------------------------------------------------------- batches, and updates


def batched(eqn: JaxprEqn, graph: Graph) -> list[JaxprEqn]:
    """A gather or scatter, with dims whose index counts up as batch dims.

    `x[jnp.arange(B)[:, None], i]` reads row b of `x` for row b of `i`, as a batch of gathers does.
    """
    numbers, indices = eqn.params["dimension_numbers"], eqn.invars[1]
    parts, reads = _parts(indices, graph), eqn.primitive is p.gather_p
    if len(parts) < 2:
        return [eqn]
    gone = numbers.collapsed_slice_dims if reads else numbers.inserted_window_dims
    index_map = numbers.start_index_map if reads else numbers.scatter_dims_to_operand_dims
    theirs = "start_indices_batching_dims" if reads else "scatter_indices_batching_dims"
    pairs = dict(zip(numbers.operand_batching_dims, getattr(numbers, theirs), strict=True))
    kept, dims = [], []
    for part, dim in zip(parts, index_map, strict=False):
        along = _counting(part, graph)
        size = None if along is None else indices.aval.shape[along]
        if dim in gone and size == eqn.invars[0].aval.shape[dim] and along not in pairs.values():
            pairs[dim] = along
        else:
            kept.append(part)
            dims.append(dim)
    if len(parts) != len(index_map) or len(kept) == len(index_map) or not kept:
        return [eqn]
    pairs = dict(sorted(pairs.items()))
    named = {
        "collapsed_slice_dims" if reads else "inserted_window_dims": tuple(
            d for d in gone if d not in pairs
        ),
        "start_index_map" if reads else "scatter_dims_to_operand_dims": tuple(dims),
        "operand_batching_dims": tuple(pairs),
        theirs: tuple(pairs.values()),
    }
    aval = indices.aval.update(shape=(*indices.aval.shape[:-1], len(kept)))
    joined = graph.makers[indices].replace(invars=kept, outvars=[Var(aval)])
    rest = {"dimension_numbers": numbers._replace(**named), "indices_are_sorted": False}
    invars = [eqn.invars[0], joined.outvars[0], *eqn.invars[2:]]
    return [joined, eqn.replace(invars=invars, params=eqn.params | rest)]


def _counting(part: Any, graph: Graph) -> int | None:
    """The dim along which integers are those from 0 on, and equal along all others."""
    numbers = known_numbers(part, graph)
    once = _NONE if numbers is None else _once(numbers)
    along = [d for d, n in enumerate(once.shape) if n > 1]
    counts = len(along) == 1 and np.array_equal(once.reshape(-1), np.arange(once.size))
    return along[0] if counts else None


COMBINING = {
    p.scatter_add_p: (p.add_p, "sum"),
    scatter_sub_p: (p.sub_p, "sum"),
    p.scatter_mul_p: (p.mul_p, "prod"),
    p.scatter_min_p: (p.min_p, "min"),
    p.scatter_max_p: (p.max_p, "max"),
}


def without_updates(graph: Graph) -> list[JaxprEqn]:
    """The equations with updates of known windows as elementwise operators on row maps.

    `x.at[1:-1].add(y)` adds a tensor that is `y` inside and nothing outside. Updates of windows
    that do not overlap, one after the other, are one. A single window that is small stays.
    """
    found = {
        eqn: layers
        for eqn in graph.eqns
        if eqn.primitive in COMBINING and (layers := _combined(eqn, graph)) is not None
    }
    if not found:
        return graph.eqns
    eqns: list[JaxprEqn] = []
    joined: dict[Any, tuple[Any, list[Layer]]] = {}  # the operand and the windows of updates
    for eqn in graph.eqns:
        layers = found.get(eqn)
        if layers is None:
            eqns.append(eqn)
            continue
        (out,), operand = eqn.outvars, eqn.invars[0]
        start, windows = joined.pop(operand, (operand, []))
        for layer in layers:
            if not all(layer.is_apart_from(w) for w in windows):  # a row is updated again
                between = eqn.replace(outvars=[Var(out.aval)])
                eqns += _by_element(between, start, windows)
                start, windows = between.outvars[0], []
            windows.append(layer)
        user = graph.users(out)[0] if graph.users(out) and graph.uses(out) == 1 else eqn
        follows = user.primitive is eqn.primitive and user.invars[0] is out and user in found
        if follows:
            joined[out] = (start, windows)
            continue
        many = start is not operand or len(windows) > 1 or _FEW * windows[0].size >= out.aval.size
        eqns += _by_element(eqn, start, windows) if many else [eqn]
    return eqns


_FEW = 8  # a window of less than one element in so many is updated by itself


def _combined(eqn: JaxprEqn, graph: Graph) -> tuple[Layer, ...] | None:
    dtype = eqn.outvars[0].aval.dtype
    if not jnp.issubdtype(dtype, np.number) or dtype.itemsize < 2:  # some have no negative zero
        return None
    if COMBINING[eqn.primitive][1] in ("min", "max") and dtype.kind == "c":
        return None
    return scattered(eqn, graph)


def _by_element(eqn: JaxprEqn, start: Any, windows: Sequence[Layer]) -> list[JaxprEqn]:
    """An update of windows of `start`, as an operator on all its elements."""
    operator, kind = COMBINING[eqn.primitive]
    aval = eqn.outvars[0].aval
    number = identity(kind, aval.dtype)
    # Zeros whose sign is such that they change no number, not even a zero's.
    number = -number if operator is p.add_p else number
    nothing = Literal(np.asarray(number, aval.dtype), aval.update(shape=(), weak_type=False))
    update = Var(aval)
    layers = [constant(nothing, aval.shape), *windows]
    made = painting(replacing(eqn, row_map_p, [], update), layers)
    return [*made, replacing(eqn, operator, [start, update], eqn.outvars[0])]
