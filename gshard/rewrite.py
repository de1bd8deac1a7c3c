"""Equations that say more together than one by one.

A roll is a concatenation of two slices of one tensor. Taken one by one, the slices would be dealt
out to all devices, and put together again; as one operator it is a permute of the rows that pass
from a tile to the next. So are rows that make way for others (`concatenate([y, x[:-1]])`), or for
padding. Rows set at an index that is known (`x.at[1:].set(y)`), which JAX writes as a scatter, are
a concatenation too: of the rows before, the new ones, and the rows after. Rows of a concatenation
are rows of what it is made of, so that a roll whose first row is set at once is a shift, and no row
goes round. A product whose result is transposed, as JAX writes the gradient of a weight, is the
product of its operands in the other order: what is scattered then need not be copied into another
order first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Literal, Primitive
from jax.extend.core import primitives as p

from gshard._jax import Var, mlir, split_p
from gshard.permuted import without_questions

MOST_INDICES = 16  # numbers in an index whose value is looked for

Window = tuple[Any, int, int]  # a tensor, and the rows of it: first and end

concatenate_slices_p = Primitive("concatenate_slices")  # of `windows`: (operand, start, limit)


def _concatenate_slices(
    *operands: jax.Array, dimension: int, windows: tuple[tuple[int, int, int], ...]
) -> jax.Array:
    """What it means, for regions that gshard does not partition."""
    parts = [
        lax.slice_in_dim(operands[number], start, limit, axis=dimension)
        for number, start, limit in windows
    ]
    return lax.concatenate(parts, dimension)


@concatenate_slices_p.def_abstract_eval
def _concatenate_slices_aval(*operands: Any, dimension: int, windows: Any) -> ShapedArray:
    shape = list(operands[0].shape)
    shape[dimension] = sum(limit - start for _, start, limit in windows)
    return ShapedArray(shape, operands[0].dtype)


mlir.register_lowering(
    concatenate_slices_p, mlir.lower_fun(_concatenate_slices, multiple_results=False)
)


def fold(
    eqns: Sequence[JaxprEqn], results: Sequence[Any], consts: Mapping[Any, Any]
) -> list[JaxprEqn]:
    """The equations of a program with these results and constants, some of them joined."""
    eqns = without_questions(eqns)
    made = {v: eqn for eqn in eqns for v in eqn.outvars}
    atoms = [*(a for eqn in eqns for a in eqn.invars), *results]
    uses = Counter(a for a in atoms if not isinstance(a, Literal))
    folded: list[JaxprEqn] = []
    for eqn in eqns:
        if eqn.primitive is p.concatenate_p:
            windows: list[Window] = [
                (a, 0, a.aval.shape[eqn.params["dimension"]]) for a in eqn.invars
            ]
            folded.append(_concatenation(eqn, windows, eqn.params["dimension"], made))
        elif eqn.primitive is p.scatter_p:
            update = _static_update(eqn, made, consts)
            made.update((v, new) for new in update for v in new.outvars)
            folded += update
        elif eqn.primitive in (p.add_p, p.add_jaxvals_p):
            folded.append(_sum_of_padded(eqn, made))
        elif eqn.primitive in (p.pad_p, p.slice_p):
            folded += _shifted(eqn, made)
        elif eqn.primitive is p.transpose_p and uses[eqn.invars[0]] == 1:
            folded.append(_other_way_round(eqn, made.get(eqn.invars[0])))
        else:
            folded.append(eqn)
    live = {v for v in results if not isinstance(v, Literal)}
    kept = []
    for eqn in reversed(folded):
        if not eqn.effects and not live.intersection(eqn.outvars):
            continue
        live.update(a for a in eqn.invars if not isinstance(a, Literal))
        kept.append(eqn)
    return kept[::-1]


def _concatenation(
    eqn: JaxprEqn, whole: Sequence[Window], dim: int, made: Mapping[Any, JaxprEqn]
) -> JaxprEqn:
    """Windows one after the other; a slice gives way to its source where most of that is used."""
    parts = [
        window if isinstance(window[0], Literal) else _origin(window, dim, made) for window in whole
    ]
    windows: list[tuple[int, int, int]] = []
    operands: list[Any] = []
    for (source, start, limit), one in zip(parts, whole, strict=True):
        rows = [l - s for other, s, l in parts if other is source]
        if 2 * sum(rows) < source.aval.shape[dim]:
            source, start, limit = one
        if not any(source is o for o in operands):
            operands.append(source)
        number = next(i for i, o in enumerate(operands) if o is source)
        windows.append((number, start, limit))
    if eqn.primitive is p.concatenate_p and [*map(id, operands)] == [*map(id, eqn.invars)]:
        return eqn
    params = {"dimension": dim, "windows": tuple(windows)}
    return eqn.replace(invars=operands, primitive=concatenate_slices_p, params=params)


def _other_way_round(eqn: JaxprEqn, product: JaxprEqn | None) -> JaxprEqn:
    """A product of which one operand's dims are moved behind the other's: `(a @ b).T`."""
    if product is None or product.primitive is not p.dot_general_p:
        return eqn
    params = product.params
    (left, right), (left_batch, right_batch) = params["dimension_numbers"]
    batch, rank = len(left_batch), len(eqn.params["permutation"])
    of_left = batch + product.invars[0].aval.ndim - len(left) - batch
    swapped = (*range(batch), *range(of_left, rank), *range(batch, of_left))
    if tuple(eqn.params["permutation"]) != swapped or params.get("out_sharding") is not None:
        return eqn
    precision = params["precision"]
    numbers = ((right, left), (right_batch, left_batch))
    other = {
        "dimension_numbers": numbers,
        "precision": precision[::-1] if isinstance(precision, tuple) else precision,
    }
    return product.replace(
        invars=product.invars[::-1], outvars=eqn.outvars, params={**params, **other}
    )


def _static_update(
    eqn: JaxprEqn, made: Mapping[Any, JaxprEqn], consts: Mapping[Any, Any]
) -> list[JaxprEqn]:
    """A scatter of one window whose place is known, and which is smaller along one dim only."""
    operand, indices, update = eqn.invars
    numbers, shape = eqn.params["dimension_numbers"], operand.aval.shape
    sizes = list(update.aval.shape)
    if len(numbers.update_window_dims) != len(sizes) or numbers.operand_batching_dims:
        return [eqn]
    for dim in numbers.inserted_window_dims:
        sizes.insert(dim, 1)
    begins = constant(indices, made, consts)
    dims = [d for d, (n, m) in enumerate(zip(shape, sizes, strict=True)) if n != m]
    if begins is None or len(dims) != 1:
        return [eqn]
    starts = dict(zip(numbers.scatter_dims_to_operand_dims, begins.tolist(), strict=True))
    (dim,) = dims
    at = starts.pop(dim, 0)
    if any(starts.values()) or not 0 <= at <= shape[dim] - sizes[dim]:
        return [eqn]
    before = []
    if numbers.inserted_window_dims:
        whole = Var(update.aval.update(shape=tuple(sizes)))
        params = {"new_sizes": tuple(sizes), "dimensions": None, "sharding": None}
        before = [
            eqn.replace(invars=[update], outvars=[whole], primitive=p.reshape_p, params=params)
        ]
        update = whole
    windows = [(operand, 0, at), (update, 0, sizes[dim]), (operand, at + sizes[dim], shape[dim])]
    windows = [w for w in windows if w[1] < w[2]]
    return [*before, _concatenation(eqn, windows, dim, made)]


def constant(
    atom: Any, made: Mapping[Any, JaxprEqn], consts: Mapping[Any, Any]
) -> np.ndarray | None:
    """The value of an index, if that is known."""
    if isinstance(atom, Literal):
        return np.asarray(atom.val)
    if atom in consts:
        return np.asarray(consts[atom])
    eqn = made.get(atom)
    if eqn is None or eqn.primitive not in _INDEX_MATH or atom.aval.size > MOST_INDICES:
        return None
    operands = [constant(a, made, consts) for a in eqn.invars]
    if any(o is None for o in operands):
        return None
    with jax.ensure_compile_time_eval():
        params = eqn.primitive.get_bind_params(eqn.params)
        return np.asarray(eqn.primitive.bind(*operands, **params))


_INDEX_MATH = (
    p.broadcast_in_dim_p, p.concatenate_p, p.reshape_p, p.squeeze_p, p.convert_element_type_p,
    p.add_p, p.lt_p, p.select_n_p,
)  # fmt: skip


def _origin(window: Window, dim: int, made: Mapping[Any, JaxprEqn]) -> Window:
    """Rows of a slice or of a part of a concatenation, as rows of what they come from."""
    found = _cut(window[0], made.get(window[0]), dim, *window[1:]) or window
    while part := _part(found, dim, made):
        found = _cut(part[0], made.get(part[0]), dim, *part[1:]) or part
    return found


def _part(window: Window, dim: int, made: Mapping[Any, JaxprEqn]) -> Window | None:
    """Rows of a concatenation along `dim`, all from one operand, as rows of that."""
    atom, first, end = window
    eqn = None if isinstance(atom, Literal) else made.get(atom)
    if eqn is None or eqn.params.get("dimension") != dim:
        return None
    if eqn.primitive is p.concatenate_p:
        windows = [(a, 0, a.aval.shape[dim]) for a in eqn.invars]
    elif eqn.primitive is concatenate_slices_p:
        windows = [(eqn.invars[n], start, limit) for n, start, limit in eqn.params["windows"]]
    else:
        return None
    for source, start, limit in windows:
        if 0 <= first < end <= limit - start:
            return source, start + first, start + end
        first, end = first - (limit - start), end - (limit - start)
    return None


def _cut(atom: Any, eqn: JaxprEqn | None, dim: int, first: int, end: int) -> Window | None:
    """Rows `first` to `end` of a slice along `dim` alone, as rows of its source."""
    if eqn is not None and eqn.primitive is split_p and eqn.params["axis"] == dim:
        number = next(i for i, v in enumerate(eqn.outvars) if v is atom)
        before = int(sum(eqn.params["sizes"][:number]))
        return eqn.invars[0], before + first, before + end
    if eqn is not None and eqn.primitive is p.pad_p:  # by less than nothing: what is left
        config = [tuple(map(int, c)) for c in eqn.params["padding_config"]]
        low, high, interior = config.pop(dim)
        cuts = low <= 0 >= high and not interior and set(config) <= {(0, 0, 0)}
        return (eqn.invars[0], first - low, end - low) if cuts else None
    if eqn is None or eqn.primitive is not p.slice_p:
        return None
    if any(s != 1 for s in eqn.params["strides"] or ()):
        return None
    (source,) = eqn.invars
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    for d, (start, limit, n) in enumerate(zip(starts, limits, source.aval.shape, strict=True)):
        if d != dim and (start, limit) != (0, n):
            return None
    return source, int(starts[dim]) + first, int(starts[dim]) + end


def _sum_of_padded(eqn: JaxprEqn, made: Mapping[Any, JaxprEqn]) -> JaxprEqn:
    """Two tensors padded with zeros that leave each other room, added: a concatenation.

    That is what JAX makes of the gradient of a roll.
    """
    found = [None if isinstance(a, Literal) else _padding(made.get(a)) for a in eqn.invars]
    parts = [part for part in found if part is not None and part.is_zero]
    if len(parts) < 2:
        return eqn
    first, second = sorted(parts, key=lambda part: part.low)
    dim, rows = first.dim, [part.rows for part in (first, second)]
    if dim != second.dim or first.low or sum(rows) != eqn.outvars[0].aval.shape[dim]:
        return eqn
    windows: list[Window] = [(first.operand, 0, rows[0]), (second.operand, 0, rows[1])]
    joined = eqn.replace(
        invars=[first.operand, second.operand],
        primitive=p.concatenate_p,
        params={"dimension": dim},
    )
    return _concatenation(joined, windows, dim, made)


@dataclass(frozen=True)
class _Padding:
    """A tensor, with so many rows of a value before and after it along a dim."""

    operand: Any
    value: Any
    dim: int
    low: int
    high: int

    @property
    def rows(self) -> int:
        """The tensor's own."""
        return self.operand.aval.shape[self.dim]

    @property
    def is_zero(self) -> bool:
        """Whether the value is known to be 0."""
        return isinstance(self.value, Literal) and self.value.val == 0


def _padding(eqn: JaxprEqn | None) -> _Padding | None:
    """What an equation pads, if it does so along one dim, at its ends."""
    if eqn is None or eqn.primitive is not p.pad_p:
        return None
    config = [tuple(map(int, c)) for c in eqn.params["padding_config"]]
    padded = [d for d, c in enumerate(config) if c != (0, 0, 0)]
    if len(padded) != 1 or min(config[padded[0]]) < 0 or config[padded[0]][2]:
        return None
    (dim,) = padded
    operand, value = eqn.invars
    low, high, _ = config[dim]
    return _Padding(operand, value, dim, low, high)


def _shifted(eqn: JaxprEqn, made: Mapping[Any, JaxprEqn]) -> list[JaxprEqn]:
    """A padded slice, or a slice of what is padded: rows that make way for padding."""
    if eqn.primitive is p.pad_p:
        pad = _padding(eqn)
        maker = pad and made.get(pad.operand)
        part = pad and _cut(pad.operand, maker, pad.dim, 0, pad.rows)
    else:
        pad = _padding(made.get(eqn.invars[0]))
        part = pad and _cut(eqn.outvars[0], eqn, pad.dim, 0, eqn.outvars[0].aval.shape[pad.dim])
        if pad and part:
            _, start, limit = part
            low, high = max(pad.low - start, 0), max(limit - pad.low - pad.rows, 0)
            part = pad.operand, max(start - pad.low, 0), min(limit - pad.low, pad.rows)
            pad = replace(pad, low=low, high=high)
    if not pad or not part or not 0 < part[0].aval.shape[pad.dim] <= 2 * (part[2] - part[1]):
        return [eqn]
    before, windows = [], []
    for rows in (pad.low, pad.high):
        shape = tuple(rows if d == pad.dim else n for d, n in enumerate(part[0].aval.shape))
        filled = Var(part[0].aval.update(shape=shape))
        params = {"shape": shape, "broadcast_dimensions": (), "sharding": None}
        before.append(
            eqn.replace(
                invars=[pad.value],
                outvars=[filled],
                primitive=p.broadcast_in_dim_p,
                params=params,
            )
        )
        windows.append((filled, 0, rows))
    parts = [w for w in (windows[0], part, windows[1]) if w[1] < w[2]]
    joined = eqn.replace(primitive=concatenate_slices_p)
    return [*before, _concatenation(joined, parts, pad.dim, made)]
