"""A number under exact comparison, and the other values of a program.

Every value has a leading dim: an entry for each device, or a single one if all devices have the
same. Integers, masks and random bits are arrays, and are themselves. Floats are `Exact`: a float in
64 bits, which decides comparisons and branches, and an element of a finite field, which says what
the number is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gshard.checking.exact import field
from gshard.tensors.keys import is_key, is_key_type

EXACT_SUM = 99  # bits of a sum that was never rounded
_NAN, _INF = field.element("nan"), field.element("inf")
_POISON = field.key_of("padding")


@dataclass(frozen=True, eq=False, slots=True)
class Exact:
    """Floats `f`, and elements `r` of the field.

    `exp` of a number is the root of the field to the power of a hash of it. For a difference from a
    maximum, `e` has the difference of the hashes in place of that: exp(a - b) is exp(a) / exp(b).
    `is_max` says that it is a maximum, `sum_bits` how many bits the narrowest type has that
    something was added up in on the way here from the last value that was compared. As a polynomial
    of random elements it has a `degree` of at most so much.
    """

    f: np.ndarray
    r: np.ndarray
    e: np.ndarray | None = None
    is_max: bool = False
    sum_bits: int = EXACT_SUM
    degree: float = 1.0

    shape = property(lambda self: self.f.shape)
    ndim = property(lambda self: self.f.ndim)


@dataclass(frozen=True, eq=False, slots=True)
class Bits:
    """The bits of floats as integers; a `tag` has the numbers, several if they share an integer."""

    i: np.ndarray
    tag: Exact

    shape = property(lambda self: self.i.shape)
    ndim = property(lambda self: self.i.ndim)


@dataclass(frozen=True, eq=False, slots=True)
class Keys:
    """Random keys, as the integers that they are made of, in an additional last dim."""

    raw: np.ndarray
    impl: str

    shape = property(lambda self: self.raw.shape[:-1])
    ndim = property(lambda self: self.raw.ndim - 1)


Value = Any  # np.ndarray | Exact | Bits | Keys
Move = Callable[[np.ndarray], np.ndarray]


def is_float(dtype: Any) -> bool:
    """Whether numbers of this type are in the field."""
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def settled(f: np.ndarray, r: np.ndarray) -> np.ndarray:
    """The field's elements of these floats: all infinities of one sign are one, and all NaNs."""
    finite = np.isfinite(f)
    if finite.all():
        return r
    odd = np.where(np.isnan(f), _NAN, np.where(np.real(f) > 0, _INF, field.neg(_INF)))
    return np.where(finite, r, odd)


def exact(f: np.ndarray, r: np.ndarray, *of: Value, **more: Any) -> Exact:
    """The result of an operator on some numbers."""
    bits = min((x.sum_bits for x in of if isinstance(x, Exact)), default=EXACT_SUM)
    degree = max((x.degree for x in of if isinstance(x, Exact)), default=1.0)
    return Exact(f, settled(f, r), **{"sum_bits": bits, "degree": degree, **more})


def constant(value: Any) -> Value:
    """A constant of a program, the same on all devices: floats are the rationals that they are."""
    if is_key(value):
        return Keys(np.asarray(jax.random.key_data(value))[None], str(jax.random.key_impl(value)))
    array = np.asarray(value)[None]
    return of_floats(array) if is_float(array.dtype) else array


def of_floats(array: np.ndarray) -> Exact:
    """Floats as the rationals that they are."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        f = array.astype(np.complex128)
        real, imag = (field.of_floats(np.nan_to_num(x)) for x in (f.real, f.imag))
        return exact(f, field.add(real, field.mul(IMAGINARY, imag)))
    f = array.astype(np.float64)
    return exact(f, field.of_floats(np.where(np.isfinite(f), f, 0.0)))


IMAGINARY = field.element("i")  # complex numbers are sums with this factor


def of_integers(array: np.ndarray) -> Exact:
    """Whole numbers as numbers of the field."""
    return Exact(array.astype(np.float64), field.of_integers(array))


# ------------------------------------------------------------------------ all kinds of values


def moved(move: Move, value: Value) -> Value:
    """A value whose elements are moved: `move` leaves dims at the end as they are."""
    if isinstance(value, Exact):
        e = None if value.e is None else move(value.e)
        return replace(value, f=move(value.f), r=move(value.r), e=e)
    if isinstance(value, Bits):
        return Bits(move(value.i), moved(move, value.tag))
    if isinstance(value, Keys):
        return replace(value, raw=move(value.raw))
    return move(value)


def at(value: Value, index: Any) -> Value:
    """Some elements of a value, by an index of its first dims."""
    return moved(lambda a: a[index], value)


def reshaped(value: Value, shape: Sequence[int], order: Sequence[int] | None = None) -> Value:
    """A value with other dims, after they were put in another order."""
    return moved(lambda a: (a if order is None else a.transpose(order)).reshape(shape), value)


def joined(join: Callable[[Sequence[np.ndarray]], np.ndarray], values: Sequence[Value]) -> Value:
    """One value of the elements of several."""
    first = next((v for v in values if not isinstance(v, np.ndarray)), values[0])
    if isinstance(first, Bits):
        tags = [v.tag if isinstance(v, Bits) else untagged(v, first) for v in values]
        return Bits(join([plain(v) for v in values]), joined(join, tags))
    if isinstance(first, Keys):
        return replace(first, raw=join([v.raw for v in values]))
    if not isinstance(first, Exact):
        return join(values)
    e = join([exponents(v) for v in values]) if any(v.e is not None for v in values) else None
    return Exact(
        join([v.f for v in values]),
        join([v.r for v in values]),
        e,
        any(v.is_max for v in values),
        min(v.sum_bits for v in values),
        max(v.degree for v in values),
    )


def untagged(value: np.ndarray, like: Bits) -> Exact:
    """Numbers for integers that are no float's bits: zeros, which change no sum of bits."""
    shape = (*value.shape, *like.tag.shape[like.i.ndim :])
    return Exact(np.zeros(shape), np.zeros(shape, np.uint64))


def chosen(which: np.ndarray, yes: Value, no: Value) -> Value:
    """`yes` where `which`, else `no`."""

    def choose(both: Sequence[np.ndarray]) -> np.ndarray:
        more = max(x.ndim for x in both) - which.ndim
        return np.where(which.reshape(*which.shape, *(1,) * max(more, 0)), *both)

    return joined(choose, [yes, no])


def plain(value: Value) -> np.ndarray:
    """The integers, or the floats that control: what operators that decide look at."""
    if isinstance(value, Exact):
        return value.f
    if isinstance(value, Bits):
        return value.i
    return value.raw if isinstance(value, Keys) else value


def leading(value: Value) -> int:
    """How many entries a value has: one for each device, or one."""
    return int(plain(value).shape[0])


def spread(value: Value, count: int) -> Value:
    """A value with an entry for each of `count` devices."""
    if leading(value) == count:
        return value
    return moved(lambda a: np.broadcast_to(a, (count, *a.shape[1:])), value)


def exponents(x: Exact) -> np.ndarray:
    """The logarithms of exp(x), to the base of the field's root."""
    if x.e is not None:
        return x.e
    return on_distinct(lambda r: field.exponent_of(field.key_of("exp"), r), x.r)


def on_distinct(fn: Callable[[np.ndarray], np.ndarray], a: np.ndarray) -> np.ndarray:
    """A function of each element, once for the elements that were broadcast."""
    if 0 in a.shape or 0 not in a.strides:
        return fn(a)
    once = tuple(slice(0, 1) if step == 0 else slice(None) for step in a.strides)
    return np.broadcast_to(fn(a[once]), a.shape)


# ------------------------------------------------------------------------ points


def drawn(values: Any, dtype: Any, rng: np.random.Generator) -> Value:
    """A point at the user's values: floats with random elements of the field, one by one.

    Floats move by a part in 10**7, so that no two are equal. Whole numbers are constants and
    stay, but for tensors in which all are the same, such as zeros at the start.
    """
    if is_key_type(dtype) or not is_float(dtype):
        return constant(values)
    known = of_floats(np.asarray(values)[None])
    f = known.f
    shape, same = f.shape, f.size > 1 and bool((f == f.ravel()[0]).all())
    moving = np.isfinite(f) & (same | (f != np.rint(np.real(f))))
    size = np.where(f == 0, 1e-7, f)
    near = f + np.where(moving, size * rng.random(shape) * 1e-7, 0)
    return Exact(near, np.where(moving, rng.integers(0, field.P, shape, np.uint64), known.r))


def generic(shape: Sequence[int], rng: np.random.Generator) -> Exact:
    """A random point."""
    shape = (1, *shape)
    return Exact(rng.normal(size=shape), rng.integers(0, field.P, shape, np.uint64))


def poison(shape: Sequence[int], dtype: Any) -> Value:
    """What padding has: no result may depend on it."""
    if is_float(dtype):
        return Exact(np.full(shape, np.nan), np.full(shape, _NAN))
    garbage = field.mixed(_POISON, np.arange(int(np.prod(shape)), dtype=np.uint64))
    return garbage.astype(dtype).reshape(shape)
