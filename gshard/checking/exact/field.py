"""Arithmetic modulo the prime P = 2**61 - 1, on arrays of unsigned 64-bit integers.

Two polynomials of degree d that differ agree in a random point with a probability of at most d / P.
Products of matrices are products of 21-bit limbs in float64, which are exact and use BLAS.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gshard.checking.on_host import host

P = np.uint64(2**61 - 1)
_ORDER = np.uint64(2**61 - 2)  # of the group of units: exponents are modulo this
_ROOT = 37  # generates that group
_LIMB, _LIMBS, _TERMS = 21, 3, 2048  # so many products of two limbs add up to at most 2**53
_FEW = 4  # terms that are multiplied one by one
_BLOCK = 2**18  # elements of a large array that XLA computes at once: NumPy takes many passes
_WINDOW = 16  # bits of an exponent that are looked up at once
_CORES = ThreadPoolExecutor(os.cpu_count())
u64 = np.uint64
Array = Any  # arrays and numbers of this type


def _in_blocks(fn: Callable[..., Array]) -> Callable[..., Array]:
    """A function of elements: of few by NumPy, of many by XLA, in blocks, on all cores."""
    compiled = jax.jit(fn)

    @functools.wraps(fn)
    def run(*operands: Array) -> Array:
        shape = np.broadcast_shapes(*map(np.shape, operands))
        if math.prod(shape) < _BLOCK:
            return fn(*operands)
        out = np.empty(shape, np.uint64)
        flags: Any = ["external_loop", "buffered", "ranged", "delay_bufalloc"]
        ways: Any = [*(["readonly"] for _ in operands), ["writeonly"]]

        def block(start: int) -> None:
            each: Any = np.nditer([*operands, out], flags, ways, order="C", buffersize=_BLOCK)
            each.iterrange = start, min(start + _BLOCK, out.size)
            with each, jax.enable_x64(True), jax.default_device(host()), np.errstate(over="ignore"):
                for *own, made in each:
                    made[...] = compiled(*own) if 2 * made.size > _BLOCK else fn(*own)

        list(_CORES.map(block, range(0, out.size, _BLOCK)))
        return out

    return run


def on_each(fn: Callable[[Any], Any], parts: Sequence[Any]) -> list[Any]:
    """A function that calls no other one of this file, on each of a number's parts, at once."""
    large = sum(map(np.size, parts[0] if isinstance(parts[0], list) else parts)) >= _BLOCK
    return list(_CORES.map(fn, parts) if large else map(fn, parts))


def _once(x: Array, modulus: Array = P) -> Array:
    """`x`, below twice the modulus, modulo it."""
    least = np.minimum if isinstance(x, np.ndarray | np.uint64) else jnp.minimum
    return least(x, x - modulus)  # what is below it wraps around to a large number


def reduced(x: Array) -> Array:
    """Any 64-bit integers, modulo P."""
    return _once((x & P) + (x >> u64(61)))


@_in_blocks
def add(a: Array, b: Array) -> Array:
    """The sum."""
    return _once(a + b)


def _difference(a: Array, b: Array, modulus: Array = P) -> Array:
    return _once(a + (modulus - b), modulus)


# Differences of numbers, and of exponents.
sub = _in_blocks(_difference)
sub_exponents = _in_blocks(functools.partial(_difference, modulus=_ORDER))


def neg(a: Array) -> Array:
    """The negative."""
    return sub(u64(0), a)


def rotate(x: Array, bits: Any) -> Array:
    """`x` times 2**bits, as 2**61 is 1."""
    return ((x << bits) & P) | (x >> (61 - bits))


def _product(a: Array, b: Array) -> Array:
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


@_in_blocks
def mul(*factors: Array) -> Array:
    """The product of each two factors; their sum, if there are more."""
    return functools.reduce(lambda a, b: _once(a + b), map(_product, factors[::2], factors[1::2]))


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


def by_halves(summed: Callable[[Array], Array], a: Array) -> Array:
    """Sums of many numbers, as `summed` makes them of half of their bits."""
    low, high = summed(a & u64(2**32 - 1)), summed(a >> u64(32))
    return add(reduced(low), rotate(reduced(high), 32))


def total(a: Array, axes: Sequence[int], keepdims: bool = False) -> Array:
    """The sum over some dims."""
    return by_halves(lambda half: half.sum(tuple(axes), dtype=np.uint64, keepdims=keepdims), a)


def matmul(a: Array, b: Array) -> Array:
    """Products of matrices, batched as by NumPy."""
    batch, terms = np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-1]
    shape = (*batch, a.shape[-2], b.shape[-1])
    if terms > _TERMS:
        parts = range(0, terms, _TERMS)
        pieces = [matmul(a[..., k : k + _TERMS], b[..., k : k + _TERMS, :]) for k in parts]
        return functools.reduce(add, pieces)
    if 0 < terms <= _FEW:
        columns = ((a[..., k, None], b[..., k, None, :]) for k in range(terms))
        return mul(*itertools.chain.from_iterable(columns))
    # Large products are made in blocks, whose limbs stay in the cache of a core.
    axis = shape.index(max(shape))
    rows = max(1, _BLOCK // 8 * shape[axis] // max(math.prod(shape), a.size, b.size, 1))
    if rows >= shape[axis]:
        return _limbs_multiplied(a, b)
    a, b = (np.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (a, b))

    def part(start: int) -> Array:
        block = (slice(None),) * axis + (slice(start, start + rows),)
        left = a if axis == len(shape) - 1 else a[block]
        return _limbs_multiplied(left, b if axis == len(shape) - 2 else b[block])

    return np.concatenate(list(_CORES.map(part, range(0, shape[axis], rows))), axis)


def _limbs_multiplied(a: Array, b: Array) -> Array:
    made = np.matmul(_limbs(a, -2), _limbs(b, -1))
    shape = (*made.shape[:-2], made.shape[-2] // _LIMBS, made.shape[-1] // _LIMBS)
    split = (*made.shape[:-2], _LIMBS, shape[-2], _LIMBS, shape[-1])
    products, found = made.astype(np.uint64).reshape(split), np.zeros(shape, np.uint64)
    for weight in range(2 * _LIMBS - 1):
        pairs = [(i, weight - i) for i in range(_LIMBS) if 0 <= weight - i < _LIMBS]
        alike = functools.reduce(np.add, [products[..., i, :, j, :] for i, j in pairs])
        found += rotate(alike, _LIMB * weight % 61)
    return reduced(found)


def _limbs(a: Array, axis: int) -> Array:
    """The limbs of a matrix, one behind the other along an axis."""
    mask = u64(2**_LIMB - 1)
    limbs = [(a >> u64(_LIMB * n)) & mask for n in range(_LIMBS)]
    return np.concatenate([limb.astype(np.float64) for limb in limbs], axis)


# ------------------------------------------------------------------------ numbers and functions


def of_integers(x: Array) -> Array:
    """Whole numbers of any type."""
    wide = x.astype(np.int64 if x.dtype.kind == "i" else np.uint64).view(np.uint64)
    found = wide if x.dtype.kind == "b" else reduced(wide)
    if x.dtype.kind != "i":
        return found
    return np.where(x < 0, _once(found + (P - u64(8))), found)  # 2**64 is 8


def of_floats(x: Array) -> Array:
    """Finite floats, which are whole numbers times powers of 2."""
    fraction, exponent = np.frexp(x)
    whole = of_integers((fraction * 2.0**53).astype(np.int64))
    return rotate(whole, ((exponent - 53) % 61).astype(np.uint64))


@functools.lru_cache(4096)
def key_of(*names: Any) -> np.uint64:
    """A key for an unknown function."""
    text = repr(names).encode()
    return u64(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little"))


def element(*names: Any) -> np.uint64:
    """A random constant."""
    return u64(int(key_of(*names)) % int(P))


def mixed(key: Any, *values: Array) -> Array:
    """Keyed hashes of the elements of some arrays: any 64-bit integers."""
    found = key
    for value in values:
        found = (found ^ value) + u64(0x9E3779B97F4A7C15)
        found = (found ^ (found >> u64(30))) * u64(0xBF58476D1CE4E5B9)
        found = (found ^ (found >> u64(27))) * u64(0x94D049BB133111EB)
        found = found ^ (found >> u64(31))
    return found


def _hash(key: Any, *values: Array, modulus: Array = P) -> Array:
    return _once(mixed(key, *values) >> u64(3), modulus)


# Keyed hashes, as elements of the field and as exponents.
hashed = _in_blocks(_hash)
exponent_of = _in_blocks(functools.partial(_hash, modulus=_ORDER))


@functools.cache
def _powers() -> list[Array]:
    """Powers of the root by each window of bits of an exponent."""
    tables = []
    for first in range(0, 61, _WINDOW):
        table = np.ones(1, np.uint64)
        for bit in range(first, first + _WINDOW):
            table = np.concatenate([table, _product(table, u64(pow(_ROOT, 2**bit, int(P))))])
        tables.append(table)
    return tables


@_in_blocks
def root_to(exponents: Array) -> Array:
    """The root to these powers."""
    kind = np if isinstance(exponents, np.ndarray) else jnp
    places = ((exponents >> u64(_WINDOW * n)) & u64(2**_WINDOW - 1) for n in range(len(_powers())))
    pairs = zip(map(kind.asarray, _powers()), places, strict=True)
    return functools.reduce(_product, (table[place.astype(np.int64)] for table, place in pairs))
