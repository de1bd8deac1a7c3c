"""A number under exact comparison, and what moves numbers.

Every value has a leading dim: an entry for each device, or a single one if all devices have the
same. Integers, masks and random bits are arrays, and are themselves; random keys are the integers
that they are made of, in a further dim at the end. Floats are `Exact`: a float in 64 bits, which
decides comparisons and branches, and an element of a finite field, which says what the number is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
from jax.extend.core.primitives import dot_general_p

from gshard.checking.exact import field
from gshard.checking.on_host import signature
from gshard.graph.kinds import REDUCTIONS
from gshard.tensors.keys import is_key

EXACT_SUM = 99  # bits of a sum that was never rounded
UNKNOWN = -1  # the bits of a sum that nothing is proved about
_I = field.element("i")
_NAN, _INF = field.element("nan"), field.element("inf")
_POISON = field.key_of("padding")


@dataclass(frozen=True, eq=False, slots=True)
class Exact:
    """Floats `f`, and elements `r` of the field; a complex number's are those of its parts, `r` and
    `e`.

    `exp` of a number is the root of the field to the power of a hash of it. For a difference from a
    maximum, `e` has the difference of the hashes in place of that: exp(a - b) is exp(a) / exp(b).
    `is_max` says that it is a maximum, `sum_bits` how many bits the narrowest type has that
    something was added up in on the way here from the last value that was compared. As a polynomial
    of random elements it has a `degree` of at most so much. Integers that are the bits of floats
    are these floats, whose type is `bits`; those that share an integer have a dim at the end.
    """

    f: np.ndarray
    r: np.ndarray
    e: np.ndarray | None = None
    is_max: bool = False
    sum_bits: int = EXACT_SUM
    degree: float = 1.0
    bits: Any = None

    shape = property(lambda self: self.f.shape)
    ndim = property(lambda self: self.f.ndim)
    dtype = property(lambda self: self.f.dtype)
    is_complex = property(lambda self: self.f.dtype.kind == "c")

    @property
    def one(self) -> np.ndarray:
        """An element of the field for each number, complex ones included."""
        return field.add(self.r, field.mul(_I, self.e)) if self.is_complex else self.r


Value = Any  # np.ndarray | Exact
Move = Callable[[np.ndarray], np.ndarray]


def is_float(dtype: Any) -> bool:
    """Whether numbers of this type are in the field."""
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def exact(f: np.ndarray, *of: Value, r: np.ndarray, e: Any = None, **more: Any) -> Exact:
    """The result of an operator: all infinities of one sign are one in the field, and all NaNs."""
    finite = np.isfinite(f)
    if not finite.all():
        odd = np.where(np.isnan(f), _NAN, np.where(np.real(f) > 0, _INF, field.neg(_INF)))
        r, e = np.where(finite, r, odd), None if e is None else np.where(finite, e, field.u64(0))
    bits = min((x.sum_bits for x in of if isinstance(x, Exact)), default=EXACT_SUM)
    degree = max((x.degree for x in of if isinstance(x, Exact)), default=1.0)
    return Exact(f, r, e, **{"sum_bits": bits, "degree": degree, **more})


def by_parts(fn: Callable[..., np.ndarray], *xs: Exact) -> dict[str, Any]:
    """A linear function in the field, of both parts of complex numbers."""
    e = fn(*(x.e for x in xs)) if xs[0].is_complex else None
    return {"r": fn(*(x.r for x in xs)), "e": e}


def times(product: Callable[..., np.ndarray], a: Exact, b: Exact) -> dict[str, Any]:
    """A product in the field: of elements, or of matrices."""
    if not a.is_complex:
        return {"r": product(a.r, b.r)}
    r = field.sub(product(a.r, b.r), product(a.e, b.e))
    return {"r": r, "e": field.add(product(a.r, b.e), product(a.e, b.r))}


def of_array(array: np.ndarray) -> Value:
    """Floats as the rationals that they are; anything else is itself."""
    if not is_float(array.dtype):
        return array
    is_complex = jnp.issubdtype(array.dtype, jnp.complexfloating)
    f = array.astype(np.complex128 if is_complex else np.float64)
    parts = (f.real, f.imag) if is_complex else (f,)
    known = [field.of_floats(np.where(np.isfinite(x), x, 0.0)) for x in parts]
    return exact(f, r=known[0], e=known[1] if is_complex else None)


def floats(value: Any) -> np.ndarray:
    """A constant, the same on all devices, as an array."""
    return np.asarray(jax.random.key_data(value) if is_key(value) else value)[None]


def constant(value: Any) -> Value:
    """A constant, the same on all devices."""
    return of_array(floats(value))


def integers(value: Value, dtype: Any) -> np.ndarray:
    """The integers of a value, which may be the bits of floats."""
    if not isinstance(value, Exact):
        return value
    raw = np.ascontiguousarray(value.f.astype(value.bits)).view(dtype)
    return raw[..., 0] if dtype.itemsize > value.bits.itemsize else raw


def plain(value: Value) -> np.ndarray:
    """The integers, or the floats that control: what operators that decide look at."""
    return value.f if isinstance(value, Exact) else value


# ------------------------------------------------------------------------ moved elements


def moved(move: Move, value: Value) -> Value:
    """A value whose elements are moved: `move` leaves dims at the end as they are."""
    if not isinstance(value, Exact):
        return move(value)
    f, r, *e = field.on_each(move, _parts(value))
    return replace(value, f=f, r=r, e=e[0] if e else None)


def at(value: Value, index: Any) -> Value:
    """Some elements of a value, by an index of its first dims."""
    return moved(lambda a: a[index], value)


def joined(join: Callable[[Sequence[np.ndarray]], np.ndarray], values: Sequence[Value]) -> Value:
    """One value of the elements of several."""
    first = next((v for v in values if isinstance(v, Exact)), None)
    if first is None:
        return join(values)
    values = [v if isinstance(v, Exact) else _as_bits(v, first) for v in values]
    parts = [[v.f for v in values], [v.r for v in values]]
    parts += [[exponents(v) for v in values]] if any(v.e is not None for v in values) else []
    f, r, *e = field.on_each(join, parts)
    is_max, bits = any(v.is_max for v in values), min(v.sum_bits for v in values)
    degree = max(v.degree for v in values)
    return Exact(f, r, e[0] if e else None, is_max, bits, degree, first.bits)


def _as_bits(value: np.ndarray, like: Exact) -> Exact:
    """Integers beside those that are the bits of floats; the least is what NaN is in an order."""
    raw = np.ascontiguousarray(value)[..., None].view(like.bits)
    if value.dtype.kind == "i":
        raw = np.where(value[..., None] == np.iinfo(value.dtype).min, np.nan, raw)
    made: Exact = of_array(raw[..., 0] if raw.shape[-1] == 1 else raw)
    return replace(made, bits=like.bits)


def beside(mask: np.ndarray, array: np.ndarray) -> np.ndarray:
    """A mask beside an array that has more dims at the end."""
    return mask.reshape(*mask.shape, *(1,) * max(array.ndim - mask.ndim, 0))


def chosen(which: np.ndarray, yes: Value, no: Value) -> Value:
    """`yes` where `which`, else `no`."""

    def choose(both: Sequence[np.ndarray]) -> np.ndarray:
        return np.where(beside(which, max(both, key=np.ndim)), *both)

    return joined(choose, [yes, no])


def spread(value: Value, count: int) -> Value:
    """A value with an entry for each of `count` devices."""
    if len(plain(value)) == count:
        return value
    return moved(lambda a: np.broadcast_to(a, (count, *a.shape[1:])), value)


def alike(values: Sequence[Value]) -> list[Value]:
    """Values with an entry for each device, if one of them has that."""
    count = max((len(plain(x)) for x in values), default=1)
    return [spread(x, count) for x in values]


def exponents(x: Exact) -> np.ndarray:
    """The logarithms of exp(x), to the base of the field's root."""
    if x.e is not None:
        return x.e
    return on_distinct(lambda r: field.exponent_of(field.key_of("exp"), r), x.r)


def on_distinct(fn: Move, a: np.ndarray) -> np.ndarray:
    """A function of each element, once for the elements that were broadcast."""
    if 0 in a.shape or 0 not in a.strides:
        return fn(a)
    once = tuple(slice(0, 1) if step == 0 else slice(None) for step in a.strides)
    return np.broadcast_to(fn(a[once]), a.shape)


# ------------------------------------------------------------------------ points


def drawn(values: Any, rng: np.random.Generator) -> Value:
    """A point at the user's values: floats with random elements of the field, one by one.

    Floats move by a part in 10**7, so that no two are equal. Whole numbers are constants and
    stay, but for tensors in which all are the same, such as zeros at the start.
    """
    known = constant(values)
    if not isinstance(known, Exact):
        return known
    f, shape = known.f, known.shape
    same = f.size > 1 and bool((f == f.ravel()[0]).all())
    moving = np.isfinite(f) & (same | (f != np.rint(np.real(f))))
    size = np.where(f == 0, 1e-7, f)
    near = f + np.where(moving, size * rng.random(shape) * 1e-7, 0)
    draw = lambda part: np.where(moving, rng.integers(0, field.P, shape, np.uint64), part)  # noqa: E731
    return Exact(near, **by_parts(draw, known))


def poison(shape: Sequence[int], like: Value) -> Value:
    """What padding has: no result may depend on it."""
    if isinstance(like, Exact):
        nan = replace(like, f=np.full(shape, np.nan, like.dtype), e=None)
        return replace(nan, **by_parts(lambda *_: np.full(shape, _NAN), nan))
    if is_float(like.dtype):
        return np.full(shape, np.nan, like.dtype)
    garbage = field.mixed(_POISON, np.arange(int(np.prod(shape)), dtype=np.uint64))
    return garbage.astype(like.dtype).reshape(shape)


# ------------------------------------------------------------------------ computed once

# Both programs apply the same operators to the same memory: a value that was compared is one array
# of both, of which devices have tiles. Dims have labels, as in an einsum: where sizes and strides
# by label are the same, large results are, and are computed once.
_LARGE = 2**15  # elements: less than that is computed again
_AXES = ("axes", "axis", "dimension_numbers", "sharding", "out_sharding")

Labels = Sequence[int]
# Results since the last comparison, with their operands, whose memory nothing else can have so.
_known: dict[Hashable, tuple[Sequence[Value], list[Value]]] = {}
forget = _known.clear


def _labels(eqn: JaxprEqn, on_elements: bool) -> tuple[list[Labels], Labels] | None:
    """The labels of the dims of all operands, and of the result's; 0 is that of devices."""
    ranks = [a.aval.ndim for a in eqn.invars]
    own = list(range(1 + max(ranks, default=0)))
    if eqn.primitive is dot_general_p:
        (left, right), (one, two) = eqn.params["dimension_numbers"]
        a, b = own[: 1 + ranks[0]], [0, *(-1 - d for d in range(ranks[1]))]
        for d, of in zip((*right, *two), (*left, *one), strict=True):
            b[1 + d] = 1 + of
        batch, gone = [1 + d for d in one], {0, *(1 + d for d in (*left, *one))}
        return [a, b], [0, *batch, *(d for d in (*a, *b) if d not in gone)]
    if eqn.primitive in REDUCTIONS:
        axes = eqn.params.get("axes", (eqn.params.get("axis"),))
        return [own], [d for d in own if d - 1 not in axes]
    return ([own for _ in ranks], own) if on_elements and ranks else None


def _memory(arrays: Sequence[np.ndarray], labels: Sequence[Labels], out: Labels) -> tuple[Any, Any]:
    """Where elements are, by label: the same for all shapes that hold the same ones."""
    sizes: dict[int, int] = dict.fromkeys(out, 1)
    steps: list[dict[int, int]] = []
    for array, dims in zip(arrays, labels, strict=True):
        of = list(zip(dims, array.shape, array.strides, strict=True))
        sizes |= {dim: max(size, sizes.get(dim, 1)) for dim, size, _ in of}
        steps.append({dim: step for dim, size, step in of if size > 1})
    found: list[tuple[bool, int, tuple[int, ...]]] = []
    for dim, size in sizes.items():
        if size == 1:
            continue
        kept, own = dim in out, tuple(step.get(dim, 0) for step in steps)
        if found and found[-1][0] == kept and found[-1][2] == tuple(size * n for n in own):
            size *= found.pop()[1]  # one dim, in all of the arrays
        found.append((kept, size, own))
    return tuple(found), tuple((_place(a), a.dtype.str) for a in arrays)


def _place(a: np.ndarray) -> Any:
    """Where an array is; of a single number, that number."""
    is_single = a.size and all(n == 1 or not step for n, step in zip(a.shape, a.strides))  # noqa: B905
    return a.flat[0].tobytes() if is_single else a.__array_interface__["data"][0]


def operator_once(
    eqn: JaxprEqn, operands: Sequence[Value], on_elements: bool, run: Callable[[], list[Value]]
) -> list[Value]:
    """The results of an operator."""
    if eqn.effects or not any(a.size >= _LARGE for x in operands for a in _parts(x)):
        return run()
    labels, ranks = _labels(eqn, on_elements), [plain(x).ndim for x in operands]
    if labels is None or ranks != [len(dims) for dims in labels[0]]:
        return _once(signature(eqn), operands, None, run)
    aval, settings = eqn.outvars[0].aval, [x for x in eqn.params.items() if x[0] not in _AXES]
    found = _once((eqn.primitive, aval.dtype, *map(str, settings)), operands, labels, run)
    shape = (max(len(plain(x)) for x in operands), *aval.shape)
    return [moved(lambda a: a.reshape(shape), x) for x in found]


def stacked_once(rows: Sequence[Value]) -> Value:
    """The rows of a loop as one value, with a further dim behind that of devices."""
    dims, shape = range(plain(rows[0]).ndim), (len(rows), *plain(rows[0]).shape)
    labels = [dims for _ in rows], dims
    (made,) = _once("stack", rows, labels, lambda: [joined(np.stack, rows)])
    return moved(lambda a: np.moveaxis(a.reshape(shape), 0, 1), made)


def _once(
    kind: Hashable, operands: Sequence[Value], labels: Any, run: Callable[[], list[Value]]
) -> list[Value]:
    """Results, or what they were of operands with the same memory: all of it, without labels."""
    arrays = [a for x in operands for a in _parts(x)]
    about = [(x.is_max, x.sum_bits, x.degree, x.bits) for x in operands if isinstance(x, Exact)]
    if labels is None:
        where: Any = tuple((_place(a), a.shape, a.strides, a.dtype.str) for a in arrays)
    else:
        dims = [own for own, x in zip(labels[0], operands, strict=True) for _ in _parts(x)]
        where = _memory(arrays, dims, labels[1])
    key = kind, where, *about
    if key not in _known:
        _known[key] = operands, run()
    return _known[key][1]


def _parts(value: Value) -> list[np.ndarray]:
    of = (value.f, value.r, value.e) if isinstance(value, Exact) else (value,)
    return [a for a in of if a is not None]


def different(a: np.ndarray, b: np.ndarray) -> Any:
    """Where two arrays differ: nowhere, if they are the same memory."""
    dims = range(a.ndim)
    if a.ndim == b.ndim and a.size >= _LARGE:
        steps, (one, other) = _memory([a, b], [dims, dims], dims)
        if one == other and all(own[0] == own[1] for *_, own in steps):
            return np.broadcast_to(np.False_, np.broadcast_shapes(a.shape, b.shape))
    return np.asarray(a != b)
