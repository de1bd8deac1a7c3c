"""Arithmetic modulo the prime P = 2**61 - 1, on arrays of unsigned 64-bit integers.

Two polynomials of degree d that differ agree in a random point with a probability of at most d / P.
Products of matrices are products of 21-bit limbs in float64, which are exact and use BLAS.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

P = np.uint64(2**61 - 1)
_ORDER = np.uint64(2**61 - 2)  # of the group of units: exponents are modulo this
_ROOT = 37  # generates that group
_LIMB, _LIMBS, _TERMS = 21, 3, 2048  # so many products of two limbs add up to at most 2**53
_FEW = 4  # terms that are multiplied one by one
_BLOCK = 2**15  # elements that are worked on at once
_WINDOW = 16  # bits of an exponent that are looked up at once
_inside = threading.local()
Array = Any  # arrays and numbers of the type np.uint64


def u64(number: int) -> np.uint64:
    """A constant."""
    return np.uint64(number)


def _assembled(shape: tuple[int, ...], part: Callable[[int, slice], Array]) -> Array:
    """An array of blocks along a dim, which fit into a cache, by all cores."""
    axis = shape.index(max(shape))
    rows = max(1, _BLOCK * shape[axis] // math.prod(shape))
    out = np.empty(shape, np.uint64)

    def run(start: int) -> None:
        _inside.a_block = True
        block = slice(start, start + rows)
        out[(slice(None),) * axis + (block,)] = part(axis, block)

    list(_cores().map(run, range(0, shape[axis], rows)))
    return out


def _in_one(shape: tuple[int, ...]) -> bool:
    return math.prod(shape) <= 2 * _BLOCK or getattr(_inside, "a_block", False)


def _in_blocks(fn: Callable[..., Array]) -> Callable[..., Array]:
    """A function of elements, on one block after the other."""

    @functools.wraps(fn)
    def run(*arrays: Array) -> Array:
        shape = np.broadcast_shapes(*map(np.shape, arrays))
        if _in_one(shape):
            return fn(*arrays)
        views = [np.broadcast_to(a, shape) for a in arrays]
        return _assembled(shape, lambda axis, rows: fn(*(_along(v, axis, rows) for v in views)))

    return run


def _along(a: Array, axis: int, rows: slice) -> Array:
    return a[(slice(None),) * axis + (rows,)]


@functools.cache
def _cores() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count())


def reduced(x: Array) -> Array:
    """Any 64-bit integers, modulo P."""
    return _once((x & P) + (x >> u64(61)))


@_in_blocks
def add(a: Array, b: Array) -> Array:
    """The sum."""
    return _once(a + b)


@_in_blocks
def sub(a: Array, b: Array) -> Array:
    """The difference."""
    return _once(a + (P - b))


def neg(a: Array) -> Array:
    """The negative."""
    return _once(P - a)


def _once(x: Array) -> Array:
    """`x`, below 2 P, modulo P."""
    return np.minimum(x, x - P)  # what is below P wraps around to a large number


def rotate(x: Array, bits: Any) -> Array:
    """`x` times 2**bits, as 2**61 is 1."""
    bits = np.asarray(bits, np.uint64)
    return ((x << bits) & P) | (x >> (u64(61) - bits))


@_in_blocks
def mul(a: Array, b: Array) -> Array:
    """The product, by halves of 31 and 30 bits."""
    low = u64(2**31 - 1)
    a0, a1, b0, b1 = a & low, a >> u64(31), b & low, b >> u64(31)
    middle = a1 * b0
    middle += a0 * b1
    a1 = a1 * b1
    a1 <<= u64(1)
    a0 = a0 * b0
    a0 += a1
    a0 += middle >> u64(30)
    middle &= u64(2**30 - 1)
    middle <<= u64(31)
    a0 += middle
    return reduced(a0)


def inverse(a: Array) -> Array:
    """Inverses; 0 for 0. One is computed, of the product of all; the others are products."""
    levels = [np.where(a == 0, u64(1), a).ravel()]
    while levels[-1].size > 1:
        below = levels[-1]
        if below.size % 2:
            below = levels[-1] = np.append(below, u64(1))
        levels.append(mul(below[0::2], below[1::2]))
    found = np.asarray([pow(int(x), int(P) - 2, int(P)) for x in levels[-1]], np.uint64)
    for below in reversed(levels[:-1]):
        found, wider = found[: below.size // 2], np.empty_like(below)
        wider[0::2], wider[1::2] = mul(found, below[1::2]), mul(found, below[0::2])
        found = wider
    return np.where(a == 0, u64(0), found[: a.size].reshape(a.shape))


def total(a: Array, axes: Sequence[int], keepdims: bool = False) -> Array:
    """The sum over some dims."""
    return _by_halves(lambda half: half.sum(tuple(axes), dtype=np.uint64, keepdims=keepdims), a)


def running_total(a: Array, axis: int) -> Array:
    """The cumulative sum."""
    return _by_halves(lambda half: half.cumsum(axis, dtype=np.uint64), a)


def add_at(into: Array, where: Array, values: Array) -> Array:
    """`into`, flat, with `values` added at some indices, which may repeat."""

    def added(half: Array) -> Array:
        sums = np.zeros(into.shape, np.uint64)
        np.add.at(sums, where, half)
        return sums

    return add(into, _by_halves(added, values))


def _by_halves(summed: Any, a: Array) -> Array:
    low, high = summed(a & u64(2**32 - 1)), summed(a >> u64(32))
    return add(reduced(low), rotate(reduced(high), 32))


def matmul(a: Array, b: Array) -> Array:
    """Products of matrices, batched as by NumPy."""
    batch, terms = np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-1]
    shape = (*batch, a.shape[-2], b.shape[-1])
    if not _in_one(shape):
        a, b = (np.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (a, b))

        def part(axis: int, rows: slice) -> Array:
            left = a if axis == len(shape) - 1 else _along(a, axis, rows)
            return matmul(left, b if axis == len(shape) - 2 else _along(b, axis, rows))

        return _assembled(shape, part)
    if terms > _TERMS:
        parts = range(0, terms, _TERMS)
        pieces = [matmul(a[..., k : k + _TERMS], b[..., k : k + _TERMS, :]) for k in parts]
        return functools.reduce(add, pieces)
    if terms <= _FEW:
        pairs = [(a[..., k, None], b[..., k, None, :]) for k in range(terms)]
        return functools.reduce(add, (mul(x, y) for x, y in pairs), np.zeros(shape, np.uint64))
    made = np.matmul(np.concatenate(_limbs(a), -2), np.concatenate(_limbs(b), -1))
    split = (*made.shape[:-2], _LIMBS, shape[-2], _LIMBS, shape[-1])
    products, found = made.astype(np.uint64).reshape(split), np.zeros(shape, np.uint64)
    for weight in range(2 * _LIMBS - 1):
        pairs = [(i, weight - i) for i in range(_LIMBS) if 0 <= weight - i < _LIMBS]
        alike = functools.reduce(np.add, [products[..., i, :, j, :] for i, j in pairs])
        found += rotate(alike, _LIMB * weight % 61)
    return reduced(found)


def _limbs(a: Array) -> list[Array]:
    mask = u64(2**_LIMB - 1)
    return [((a >> u64(_LIMB * n)) & mask).astype(np.float64) for n in range(_LIMBS)]


# ------------------------------------------------------------------------ numbers and functions


@_in_blocks
def of_integers(x: Array) -> Array:
    """Whole numbers of any type."""
    if x.dtype.kind in "bu":
        return reduced(x.astype(np.uint64))
    x = x.astype(np.int64)
    size = reduced(np.where(x < 0, -x, x).astype(np.uint64))
    return np.where(x < 0, neg(size), size)


@_in_blocks
def of_floats(x: Array) -> Array:
    """Finite floats, which are whole numbers times powers of 2."""
    fraction, exponent = np.frexp(x)
    whole = of_integers((fraction * 2.0**53).astype(np.int64))
    return rotate(whole, (exponent - 53) % 61)


@functools.lru_cache(4096)
def key_of(*names: Any) -> np.uint64:
    """A key for an unknown function."""
    text = repr(names).encode()
    return u64(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little"))


def element(*names: Any) -> np.uint64:
    """A random constant."""
    return u64(int(key_of(*names)) % int(P))


@_in_blocks
def mixed(key: Any, *values: Array) -> Array:
    """Keyed hashes of the elements of some arrays: any 64-bit integers."""
    found = np.asarray(key, np.uint64)
    with np.errstate(over="ignore"):
        for value in values:
            found = found ^ np.asarray(value, np.uint64)
            found = found + u64(0x9E3779B97F4A7C15)
            found = (found ^ (found >> u64(30))) * u64(0xBF58476D1CE4E5B9)
            found = (found ^ (found >> u64(27))) * u64(0x94D049BB133111EB)
            found = found ^ (found >> u64(31))
    return found


@_in_blocks
def hashed(key: Any, *values: Array) -> Array:
    """Keyed hashes, as elements of the field."""
    return _once(mixed(key, *values) >> u64(3))


@_in_blocks
def exponent_of(key: Any, values: Array) -> Array:
    """Keyed hashes, as exponents."""
    found = mixed(key, values) >> u64(3)
    return np.where(found >= _ORDER, found - _ORDER, found)


@_in_blocks
def sub_exponents(a: Array, b: Array) -> Array:
    """The difference of two exponents."""
    found = a + (_ORDER - b)
    return np.where(found >= _ORDER, found - _ORDER, found)


@functools.cache
def _powers() -> list[Array]:
    """Powers of the root by each window of bits of an exponent."""
    tables, base = [], _ROOT
    for _ in range(0, 61, _WINDOW):
        table = np.ones(1, np.uint64)
        for bit in range(_WINDOW):
            step = u64(pow(base, 2**bit, int(P)))
            table = np.concatenate([table, mul(table, step)])
        tables.append(table)
        base = pow(base, 2**_WINDOW, int(P))
    return tables


@_in_blocks
def root_to(exponents: Array) -> Array:
    """The root to these powers."""
    mask, factors = u64(2**_WINDOW - 1), _powers()
    looked_up = [
        table[((exponents >> u64(_WINDOW * n)) & mask).view(np.int64)]
        for n, table in enumerate(factors)
    ]
    return functools.reduce(mul, looked_up)
