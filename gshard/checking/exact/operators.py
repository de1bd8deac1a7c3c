"""JAX's operators on exact numbers: those of the field, unknown functions, and what only runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from gshard.checking import on_host
from gshard.checking.exact import field, moving, pointwise
from gshard.checking.exact.number import (
    UNKNOWN,
    Exact,
    Move,
    Value,
    alike,
    at,
    by_parts,
    constant,
    exact,
    integers,
    is_float,
    joined,
    moved,
    of_array,
    operator_once,
    plain,
    times,
)
from gshard.checking.exact.pointwise import (
    KEEPS_BITS,
    aligned,
    bits_of,
    converted,
    larger,
    mul,
    opaque,
    smaller,
)
from gshard.rules.linalg import MATRICES, VECTORS
from gshard.rules.pointwise import POINTWISE as ON_ELEMENTS

_CALLBACKS = ("pure_callback", "io_callback", "debug_callback", "debug_print", "mark")
_SOLVERS = (*MATRICES, *VECTORS)


def local(eqn: JaxprEqn, operands: Sequence[Value], active: np.ndarray) -> list[Value]:
    """The results of an equation that sends nothing."""
    name = eqn.primitive.name
    on_elements = name in _ON_ELEMENTS
    if on_elements and name not in KEEPS_BITS:
        pairs = zip(operands, eqn.invars, strict=True)
        operands = [integers(x, a.aval.dtype) if getattr(x, "bits", None) else x for x, a in pairs]
    wide = aligned(eqn, operands) if on_elements else operands
    return operator_once(eqn, wide, on_elements, lambda: _local(eqn, operands, wide, active))


def _local(
    eqn: JaxprEqn, operands: Sequence[Value], wide: Sequence[Value], active: np.ndarray
) -> list[Value]:
    name, of_floats = eqn.primitive.name, any(isinstance(x, Exact) for x in operands)
    integers_alone = not of_floats and not any(is_float(v.aval.dtype) for v in eqn.outvars)
    operator = _OF_ANY.get(name) or (None if integers_alone else _OF_FLOATS.get(name))
    if operator is not None:
        made = operator(eqn, *wide)
        return made if isinstance(made, list) else [made]
    if integers_alone:
        return on_host.on_each(eqn, operands, active)
    if name in _CALLBACKS:
        return [_hash_of_all(eqn, operands, n, ()) for n in range(len(eqn.outvars))]
    if eqn.primitive in _SOLVERS:
        return _solved(eqn, operands)
    if name in ON_ELEMENTS and of_floats:
        return [opaque(eqn, *wide)]
    made = _run(eqn, operands, active)
    return [_doubtful(x, n, eqn) for n, x in enumerate(made)] if of_floats else made


def _run(eqn: JaxprEqn, operands: Sequence[Value], active: Any = None) -> list[Value]:
    """An operator on the floats that control, in their own types, on each device in turn."""
    on = np.ones(max((len(plain(x)) for x in operands), default=1), bool)
    made = on_host.on_each(eqn, [plain(x) for x in operands], on if active is None else active)
    return [of_array(x) for x in made]


def _doubtful(made: Value, number: int, eqn: JaxprEqn) -> Value:
    """A result of which the floats alone are known, in the type of the program."""
    if not isinstance(made, Exact):
        return made
    r = _hashes(made.shape[1:], eqn.primitive.name, number, id(eqn)).r
    parts = by_parts(lambda part: np.broadcast_to(r, made.shape), made)
    return Exact(made.f, **parts, sum_bits=UNKNOWN)


# ------------------------------------------------------------------------ functions of all elements


def _solved(eqn: JaxprEqn, operands: Sequence[Value]) -> list[Value]:
    """Unknown functions of a matrix, for each of a batch."""
    batch = tuple(range(1, operands[0].ndim - 2))
    return [
        replace(_hash_of_all(eqn, operands, n, batch), f=made.f)
        if isinstance(made, Exact)
        else made
        for n, made in enumerate(_run(eqn, operands))
    ]


def _digest(value: Value, batch: Sequence[int]) -> np.ndarray:
    """A hash of all that is behind the batch dims, with as many dims as the operand."""
    r = value.one if isinstance(value, Exact) else field.of_integers(value)
    rest = tuple(d for d in range(1, r.ndim) if d not in batch)
    sizes = [r.shape[d] if d in rest else 1 for d in range(r.ndim)]
    weights = np.arange(math.prod(sizes), dtype=np.uint64).reshape(sizes)
    mixed = field.mul(field.hashed(field.key_of("digest"), weights), r)
    return field.total(mixed, rest, keepdims=True)


def _hash_of_all(
    eqn: JaxprEqn, operands: Sequence[Value], number: int, batch: Sequence[int]
) -> Value:
    """A result every element of which depends on all elements of its batch."""
    aval, kept = eqn.outvars[number].aval, 1 + len(batch)
    parts = [_digest(x, [d for d in batch if d < x.ndim]) for x in operands]
    parts = [x.reshape(*x.shape[:kept], *(1,) * (aval.ndim + 1 - kept)) for x in parts]
    sizes = [1 if d < kept else n for d, n in enumerate((1, *aval.shape))]
    known = {k: v for k, v in eqn.params.items() if not callable(v)}
    name = (eqn.primitive.name, number, str(sorted(known.items(), key=str)))
    count = max((len(plain(x)) for x in operands), default=1)
    wide: Move = lambda part: np.broadcast_to(part, (count, *aval.shape))  # noqa: E731
    r, e = by_parts(wide, _hashes(sizes, *name, more=parts)).values()
    if not is_float(aval.dtype):
        return (r % field.u64(2)).astype(aval.dtype)
    return converted(exact(r.astype(np.complex128) / 2.0**61, *operands, r=r, e=e), aval.dtype)


def _hashes(shape: Sequence[int], *of: Any, more: Any = ()) -> Exact:
    """An array of unknown complex numbers."""
    numbers = np.arange(math.prod(shape), dtype=np.uint64).reshape(shape)
    r, e = (field.hashed(field.key_of(*of, part), numbers, *more) for part in range(2))
    return Exact(np.zeros(r.shape, np.complex128), r, e)


def _solve(eqn: JaxprEqn, *of: Exact) -> Exact:
    """Linear in the right side: a product with an unknown matrix, which is a function of the left
    one, or of three diagonals."""
    *left, b = of
    on_left = eqn.params.get("left_side", True)
    settings = {k: v for k, v in eqn.params.items() if k != "left_side"}
    parts = [_digest(a, range(1, b.ndim - 2)) for a in left]
    parts = [x.reshape(*x.shape[: b.ndim - 2], 1, 1) for x in parts]
    size = b.shape[-2 if on_left else -1]
    name = (eqn.primitive.name, str(sorted(settings.items())))
    matrix = converted(_hashes((size, size), *name, more=parts), b.dtype)
    sides = (matrix, b) if on_left else (b, matrix)
    made = plain(_run(eqn, of)[0])
    return exact(made, *of, **times(field.matmul, *sides), degree=b.degree + 1)


# ------------------------------------------------------------------------ sums

Combine = Callable[[Value, Value], Value]


def narrowed(eqn: JaxprEqn, made: Value) -> Value:
    """A sum, with the type that it was added up in."""
    if not isinstance(made, Exact) or made.bits is not None:
        return made
    return replace(made, sum_bits=min(made.sum_bits, bits_of(eqn.outvars[0].aval.dtype)))


def summed(a: Value, axes: Sequence[int]) -> Value:
    """The sum over some dims; of narrow floats, rounded once, as compilers do."""
    if isinstance(a, Exact):
        parts = by_parts(lambda part: field.total(part, axes), a)
        return exact(a.f.sum(tuple(axes)), a, **parts, bits=a.bits)
    narrow = jnp.issubdtype(a.dtype, jnp.floating) and a.dtype.itemsize < 4
    if not is_float(a.dtype) or len(axes) > 1:
        return a.sum(tuple(axes), dtype=a.dtype)
    rows = np.moveaxis(a.astype(np.float32) if narrow else a, axes[0], 0)
    total = rows[0]
    for row in rows[1:]:  # in their order, as devices add
        total = total + row
    return total.astype(a.dtype)


def summed_in(groups: Sequence[Sequence[int]], tiles: Value) -> Value:
    """What the devices of each group have, added up; groups may have different sizes."""
    if len({len(group) for group in groups}) == 1:
        return summed(at(tiles, np.asarray(groups)), (1,))
    sums = [summed(at(tiles, np.asarray([group])), (1,)) for group in groups]
    return joined(np.concatenate, sums)


def _axes(eqn: JaxprEqn) -> tuple[int, ...]:
    return tuple(1 + d for d in eqn.params.get("axes", (eqn.params.get("axis"),)))


def folded(combine: Combine, a: Value, axis: int) -> Value:
    """All elements along an axis combined, in a tree."""
    while plain(a).shape[axis] > 1:
        size = plain(a).shape[axis]
        half = size // 2
        parts = [(0, half), (half, 2 * half), (2 * half, size)]
        first, second, rest = (at(a, (slice(None),) * axis + (slice(*part),)) for part in parts)
        a = combine(first, second)
        if size % 2:
            a = joined(lambda xs: np.concatenate(xs, axis), [a, rest])
    return moved(lambda x: x.squeeze(axis), a)


def _reduced(combine: Combine, start: Any) -> Callable[..., Value]:
    """A reduction of floats; of none, it is `start`."""

    def operator(eqn: JaxprEqn, a: Exact) -> Value:
        if 0 in [a.shape[d] for d in _axes(eqn)]:
            return constant(np.full(eqn.outvars[0].aval.shape, start, eqn.outvars[0].aval.dtype))
        for axis in sorted(_axes(eqn), reverse=True):
            a = folded(combine, a, axis)
        return a

    return operator


def _arg(combine: Combine) -> Callable[..., np.ndarray]:
    """Where the largest element is, or the smallest."""

    def operator(eqn: JaxprEqn, a: Exact) -> np.ndarray:
        (axis,) = _axes(eqn)
        best = moved(lambda x: np.expand_dims(x, axis), folded(combine, a, axis))
        return (a.one == best.one).argmax(axis).astype(eqn.params["index_dtype"])

    return operator


def _cumsum(eqn: JaxprEqn, a: Exact) -> Value:
    axis = 1 + eqn.params["axis"]
    flip: Move = (lambda x: np.flip(x, axis)) if eqn.params["reverse"] else (lambda x: x)
    cumulated: Move = lambda half: half.cumsum(axis, dtype=np.uint64)  # noqa: E731
    parts = by_parts(lambda part: flip(field.by_halves(cumulated, flip(part))), a)
    return narrowed(eqn, exact(flip(np.cumsum(flip(a.f), axis)), a, **parts))


def _dot_general(eqn: JaxprEqn, a: Value, b: Value) -> Value:
    """Values with a dim of devices: one batch of matrix products."""
    is_complex = any(x.dtype.kind == "c" for x in (a, b))
    wide = np.dtype(np.complex128 if is_complex else np.float64)
    a, b = alike([converted(x, wide) for x in (a, b)])
    contracted, batch = eqn.params["dimension_numbers"]
    sides: list[Exact] = []
    free: list[int] = []

    def as_matrices(array: np.ndarray) -> np.ndarray:
        return array.transpose(order).reshape(matrix)

    for x, own, shared in zip((a, b), contracted, batch, strict=True):
        rest = [d for d in range(x.ndim - 1) if d not in own and d not in shared]
        groups = [shared, own, rest] if sides else [shared, rest, own]
        order = [0, *(1 + d for group in groups for d in group)]
        sizes = [[x.shape[1 + d] for d in group] for group in groups]
        matrix = (x.shape[0], *sizes[0], math.prod(sizes[1]), math.prod(sizes[2]))
        free += [x.shape[1 + d] for d in rest]
        sides.append(moved(as_matrices, x))
    left, right = sides
    shape = [*left.shape[:-2], *free]
    parts = times(lambda x, y: field.matmul(x, y).reshape(shape), left, right)
    f = np.matmul(left.f, right.f).reshape(shape)
    return narrowed(eqn, exact(f, a, b, **parts, degree=a.degree + b.degree))


_ON_ELEMENTS = {*ON_ELEMENTS, "add_any", "bitcast_convert_type"}
_OF_ANY = {**pointwise.OF_ANY, **moving.OF_ANY}
_OF_FLOATS: dict[str, Callable[..., Any]] = {
    **pointwise.OF_FLOATS, **moving.OF_FLOATS, "cumsum": _cumsum,
    **dict.fromkeys(
        ("reduce_sum", "leaf_sum", "tree_sum"), lambda eqn, a: narrowed(eqn, summed(a, _axes(eqn)))
    ),
    **dict.fromkeys(("dot_general", "leaf_dot"), _dot_general),
    "reduce_prod": _reduced(lambda a, b: mul(None, a, b), 1), "argmax": _arg(larger),
    "reduce_max": _reduced(larger, -np.inf), "reduce_min": _reduced(smaller, np.inf),
    "argmin": _arg(smaller), **dict.fromkeys(("triangular_solve", "tridiagonal_solve"), _solve),
}  # fmt: skip
