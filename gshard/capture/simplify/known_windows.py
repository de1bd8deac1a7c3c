"""Gathers and scatters at known places: indices that are constants, or count up from one.

`x.at[1:-1, ::2]` reads or writes a window whose place is known when the program is made, but JAX
computes its indices at run time: as a constant index of one large window, or as an `iota` of many
small ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal
from jax.extend.core import primitives as p
from jax.lax import GatherScatterMode

from gshard._jax import Var, scatter_sub_p
from gshard.capture.simplify.painting import painting
from gshard.graph import Graph, replacing
from gshard.graph.row_map import Axis, Layer, constant
from gshard.moving.reductions import identity
from gshard.rules.base.primitives import row_map_p
from gshard.rules.base.rule import RULES, Elementwise
from gshard.rules.indexing import roles_of

_COPYING = (p.convert_element_type_p, p.copy_p)


class _Progression(NamedTuple):
    """Integers that are `start` in the first place and grow by a constant along each dim."""

    start: int
    steps: tuple[int, ...]


class _Run(NamedTuple):
    """Indices from the one at `at` on: so many, from `start` on, `step` apart."""

    at: int
    rows: int
    start: int
    step: int


def gathered(eqn: JaxprEqn, graph: Graph) -> tuple[Layer, ...] | None:
    """What a gather reads, if its indices are known."""
    links = _links(eqn, graph)
    if links is None:
        return _in_runs(eqn, graph)
    axes = [Axis(0, n) for n in eqn.outvars[0].aval.shape]
    for d, (_, to, step) in enumerate(links):
        if to is not None:
            axes[to] = Axis(0, axes[to].rows, d, 1, step if axes[to].rows > 1 else 1)
    return (Layer(eqn.invars[0], tuple(first for first, *_ in links), tuple(axes)),)


def scattered(eqn: JaxprEqn, graph: Graph) -> tuple[Layer, ...] | None:
    """The windows that a scatter writes, in the operand's coordinates, if its indices are known."""
    updates = eqn.invars[2]
    shape, links = updates.aval.shape, None if 0 in updates.aval.shape else _links(eqn, graph)
    if links is None:
        return _in_runs(eqn, graph)
    if any(shape[d] > 1 for d in {*range(len(shape))} - {to for _, to, _ in links}):
        return None  # one row is written several times
    base, axes = [0] * len(shape), []
    for at, to, step in links:
        rows = 1 if to is None else shape[to]
        if to is not None and step < 0:
            base[to], at = rows - 1, at + (rows - 1) * step
        axes.append(Axis(at, rows, to, abs(step), 1 if step > 0 else -1))
    return (Layer(updates, tuple(base), tuple(axes)),)


def _in_runs(eqn: JaxprEqn, graph: Graph) -> tuple[Layer, ...] | None:
    """The windows of rows of one dim whose indices are a few runs: `x[(i + 1) % n]`."""
    roles, (operand, indices) = roles_of(eqn), eqn.invars[:2]
    counts, shape = indices.aval.shape[:-1], operand.aval.shape
    reads = eqn.primitive is p.gather_p
    windows = eqn.outvars[0] if reads else eqn.invars[2]
    along = [k for k, n in enumerate(counts) if n > 1]
    if len(roles.index_map) != 1 or len(along) != 1:
        return None
    ((dim,), (of_index,)) = roles.index_map, along
    others = (name for d, name in enumerate(roles.operand) if d != dim)
    if roles.sizes[dim] != 1 or any(name[0] != "w" for name in others):
        return None  # batches, or not all rows of another dim
    to = roles.windows.index(f"i{of_index}")
    numbers = known_numbers(indices, graph)
    if numbers is not None and eqn.params["mode"] is GatherScatterMode.CLIP:
        numbers = np.clip(numbers, 0, shape[dim] - 1)
    if numbers is None or numbers.min() < 0 or numbers.max() >= shape[dim]:
        return None
    layers = []
    for run in _runs(numbers.reshape(-1).astype(np.int64)):
        axes = [Axis(0, n) for n in (windows if reads else operand).aval.shape]
        base = [0] * len(shape if reads else windows.aval.shape)
        for d, name in enumerate(roles.operand):
            if name[0] == "w":
                at = roles.windows.index(name)
                axes[at if reads else d] = Axis(0, shape[d], d if reads else at)
        if reads:
            axes[to], base[dim] = Axis(run.at, run.rows, dim, 1, run.step), run.start
        elif run.step > 0:
            axes[dim], base[to] = Axis(run.start, run.rows, to, run.step), run.at
        else:
            first, last = run.start + run.step * (run.rows - 1), run.at + run.rows - 1
            axes[dim], base[to] = Axis(first, run.rows, to, -run.step, -1), last
        layers.append(Layer(operand if reads else windows, tuple(base), tuple(axes)))
    return tuple(layers) or None


def _runs(numbers: np.ndarray) -> list[_Run]:
    """Indices as runs with a constant step; nothing if they are many."""
    found, at = list[_Run](), 0
    while at < len(numbers):
        steps = np.diff(numbers[at:])
        step = int(steps[0]) if len(steps) else 0
        other = np.flatnonzero(steps != step)
        count = int(other[0]) + 1 if len(other) else len(numbers) - at
        if step == 0 or (count == 2 and len(other) and abs(step) > 1):
            count, step = 1, 1  # a row by itself
        found.append(_Run(at, count, int(numbers[at]), step))
        at += count
        if len(found) > _FEW_RUNS:
            return []
    return found


_FEW_RUNS = 8
_MANY = 2**20  # indices that are computed to find runs


def known_numbers(atom: Any, graph: Graph) -> np.ndarray | None:
    """Integers that are computed of no input; None if they are not known."""
    return graph.constant(atom, _is_math, _MANY)


def _is_math(eqn: JaxprEqn) -> bool:
    """Whether an equation computes numbers by element, or copies or counts."""
    by_element = isinstance(RULES.get(eqn.primitive), Elementwise)
    return (by_element or eqn.primitive in _COUNTING) and not eqn.effects


_COUNTING = (
    p.iota_p, p.broadcast_in_dim_p, p.reshape_p, p.squeeze_p, p.concatenate_p, p.rev_p, p.slice_p,
)  # fmt: skip


def _links(eqn: JaxprEqn, graph: Graph) -> list[tuple[int, int | None, int]] | None:
    """For each dim of the operand of a gather or scatter: the first row of the windows there.

    And the dim of the windows along which further rows are, and how far apart.
    """
    roles, operand = roles_of(eqn), eqn.invars[0].aval.shape
    if any(name[0] == "b" for name in roles.operand):
        return None
    starts = _starts(eqn.invars[1], roles.index_map, roles.sizes, operand, graph)
    if starts is None:
        return None
    dims, links = {name: d for d, name in enumerate(roles.windows)}, list[Any]()
    counts = eqn.invars[1].aval.shape
    for d in range(len(operand)):
        found = starts.get(d, _Progression(0, ()))
        moved = [n for n, step in enumerate(found.steps) if step and counts[n] > 1]
        if moved:
            links.append((found.start, dims[f"i{moved[0]}"], found.steps[moved[0]]))
        else:
            links.append((found.start, dims.get(f"w{d}", dims.get(f"o{d}")), 1))
    return links


def batched(eqn: JaxprEqn, graph: Graph) -> list[JaxprEqn]:
    """A gather or scatter, with dims whose index counts up as batch dims.

    `x[jnp.arange(B)[:, None], i]` reads row b of `x` for row b of `i`, as a batch of gathers does.
    """
    numbers, indices = eqn.params["dimension_numbers"], eqn.invars[1]
    maker, last = graph.maker(indices), len(indices.aval.shape) - 1
    if maker is None or maker.primitive is not p.concatenate_p or len(maker.invars) < 2:
        return [eqn]
    reads = eqn.primitive is p.gather_p
    gone = numbers.collapsed_slice_dims if reads else numbers.inserted_window_dims
    index_map = numbers.start_index_map if reads else numbers.scatter_dims_to_operand_dims
    theirs = "start_indices_batching_dims" if reads else "scatter_indices_batching_dims"
    pairs = dict(zip(numbers.operand_batching_dims, getattr(numbers, theirs), strict=True))
    kept, dims = [], []
    for part, dim in zip(maker.invars, index_map, strict=False):
        along = _counting(part, graph) if maker.params["dimension"] == last else None
        size = None if along is None else indices.aval.shape[along]
        if dim in gone and size == eqn.invars[0].aval.shape[dim] and along not in pairs.values():
            pairs[dim] = along
        else:
            kept.append(part)
            dims.append(dim)
    if len(maker.invars) != len(index_map) or len(kept) == len(index_map) or not kept:
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
    joined = maker.replace(invars=kept, outvars=[Var(aval)])
    rest = {"dimension_numbers": numbers._replace(**named), "indices_are_sorted": False}
    invars = [eqn.invars[0], joined.outvars[0], *eqn.invars[2:]]
    return [joined, eqn.replace(invars=invars, params=eqn.params | rest)]


def _counting(part: Any, graph: Graph) -> int | None:
    """The dim along which integers are those from 0 on, and equal along all others."""
    found = _progression(part, graph)
    if found is None or found.start or sorted(found.steps)[-2:] != [0, 1] or min(found.steps) < 0:
        return None
    return found.steps.index(1)


def _starts(
    indices: Any, dims: Sequence[int], sizes: Sequence[int], shape: Sequence[int], graph: Graph
) -> dict[int, _Progression] | None:
    """Where windows start, along each indexed dim of the operand; None if that is not known.

    None, too, if windows are moved out of bounds, or by two indices along one dim.
    """
    parts = _components(indices, len(dims), graph)
    if parts is None:
        return None
    starts, counts = dict(zip(dims, parts, strict=True)), indices.aval.shape[:-1]
    used: set[int] = set()
    for d, found in starts.items():
        moved = [n for n, step in enumerate(found.steps) if step and counts[n] > 1]
        if len(moved) > 1 or used.intersection(moved) or (moved and sizes[d] != 1):
            return None
        used.update(moved)
        ends = [found.start, found.start + sum(found.steps[n] * (counts[n] - 1) for n in moved)]
        if min(ends) < 0 or max(ends) + sizes[d] > shape[d]:
            return None
    return starts


def _components(indices: Any, count: int, graph: Graph) -> list[_Progression] | None:
    """The components of indices, without the dim of the components."""
    value = graph.constant(indices)
    if value is not None:
        if value.ndim != 1:
            return None
        return [_Progression(int(v), ()) for v in value]
    eqn = graph.maker(indices)
    parts = [indices]
    if eqn is not None and eqn.primitive is p.concatenate_p:
        if eqn.params["dimension"] != len(indices.aval.shape) - 1:
            return None
        parts = list(eqn.invars)
    found = [_progression(part, graph) for part in parts]
    if len(parts) != count or any(part.aval.shape[-1] != 1 for part in parts):
        return None
    return [_Progression(f.start, f.steps[:-1]) for f in found if f] if all(found) else None


_MATH = (
    p.iota_p, p.rev_p, p.broadcast_in_dim_p, p.add_p, p.sub_p, p.mul_p, p.select_n_p, *_COPYING,
)  # fmt: skip
_DEPTH = 8  # operators that an index is computed by


def _progression(atom: Any, graph: Graph, depth: int = _DEPTH) -> _Progression | None:
    """The integers that a tensor consists of, if they are one progression."""
    shape = atom.aval.shape
    if isinstance(atom, Literal) or atom in graph.known:
        value = np.asarray(graph.constant(atom))
        return _Progression(int(value), ()) if value.ndim == 0 else None
    eqn = graph.maker(atom)
    if eqn is None or eqn.primitive not in _MATH or not depth:
        return None
    if eqn.primitive is p.iota_p:
        along = eqn.params["dimension"]
        return _Progression(0, tuple(int(d == along) for d in range(len(shape))))
    if eqn.primitive is p.select_n_p:  # a negative index counts from the end
        return _not_negative(eqn, graph, depth)
    found = [_progression(a, graph, depth - 1) for a in eqn.invars]
    if not found or None in found:
        return None
    (start, steps), *others = (f for f in found if f)
    if eqn.primitive in _COPYING:
        return _Progression(start, steps)
    if eqn.primitive is p.rev_p:
        turned = eqn.params["dimensions"]
        first = start + sum(steps[d] * (shape[d] - 1) for d in turned)
        return _Progression(first, tuple(-s if d in turned else s for d, s in enumerate(steps)))
    if eqn.primitive is p.broadcast_in_dim_p:
        to = dict(zip(eqn.params["broadcast_dimensions"], steps, strict=True))
        return _Progression(start, tuple(to.get(d, 0) for d in range(len(shape))))
    if not others:
        return None
    other, more = others[0]
    if eqn.primitive is p.mul_p and not any(more):
        return _Progression(start * other, tuple(s * other for s in steps or more))
    if eqn.primitive is p.mul_p and not any(steps):
        return _Progression(start * other, tuple(s * start for s in more))
    if eqn.primitive is p.mul_p:
        return None
    sign, none = 1 if eqn.primitive is p.add_p else -1, (0,) * len(shape)
    both = zip(steps or none, more or none, strict=True)
    return _Progression(start + sign * other, tuple(a + sign * b for a, b in both))


def _not_negative(eqn: JaxprEqn, graph: Graph, depth: int) -> _Progression | None:
    """What is selected where numbers are not below zero, if none is."""
    which, usual, *_ = eqn.invars
    test = graph.maker(which)
    if test is None or test.primitive is not p.lt_p or test.invars[0] is not usual:
        return None
    below, found = graph.constant(test.invars[1]), _progression(usual, graph, depth - 1)
    if found is None or below is None or np.any(below != 0):
        return None
    least = sum(min(0, s * (n - 1)) for s, n in zip(found.steps, usual.aval.shape, strict=True))
    return found if found.start + least >= 0 else None


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
