"""Random bits by hashing each element's index: cheap, fused into their consumer, never stored.

Dropout and stochastic rounding need many independent bits of no cryptographic worth. A generator
such as Threefry spends some 70 instructions on a word and is drawn once more, or kept, for the
backward pass; two multiplications of the element's index are as good, and are recomputed where the
bits are needed again. The numbers do not depend on how an array is split over devices.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.random import define_prng_impl

from gshard.nn.kernels import with_gradient

GOLDEN = 0x9E3779B9  # the golden ratio of 2^32: its multiples are far apart


def seed_of(key: Array) -> Array:
    """A key as a seed of two words."""
    return jax.random.bits(key, (2,), jnp.uint32)


def hash_key(key: Array) -> Array:
    """A key of the generator below, derived from `key`: `jax.random` accepts it like any other.

    Each layer splits keys for its dropouts, each with some hundred instructions of Threefry, a
    quarter of a training step's program; here it takes a dozen.
    """
    return jax.random.wrap_key_data(seed_of(key), impl=_HASH)


@functools.partial(jax.jit, static_argnums=1)  # traced once for each shape
def hashed_bits(seed: Array, shape: tuple[int, ...]) -> Array:
    """32 bits for each element of `shape`, from its index and the seed."""
    index, stride = jnp.uint32(0), 1
    for dim in reversed(range(len(shape))):
        if shape[dim] != 1:
            places = jax.lax.broadcasted_iota(jnp.uint32, shape, dim)
            index = index + places * jnp.uint32(stride % 2**32) if stride > 1 else places
        stride *= shape[dim]
    return jnp.broadcast_to(mix(mix(index ^ seed[0]) + seed[1]), shape)


def hashed_row_bits(seed: tuple[Array, Array], rows: Array, columns: Array) -> Array:
    """32 bits for each row and column, with half of the hashing done once for a row.

    A seed whose first word is larger by n gives the bits of the row that comes n later.
    """
    return mix(mix(rows + seed[0]) + seed[1] + columns * np.uint32(GOLDEN))


def mix(x: Array) -> Array:
    """A bijection of 32 bits in which every input bit flips each output bit half of the time.

    The constants are Chris Wellons's "lowbias32".
    """
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def kept(bits: Array, rate: float) -> Array:
    """True for a share 1 - `rate` of the bits."""
    return bits >= np.uint32(min(round(rate * 2**32), 2**32 - 1))


def _dropout_backward(rate: float, seed: Array, grad: Array) -> tuple[Array, None]:
    return hash_dropout(grad, seed, rate), None


@with_gradient(_dropout_backward, keep=lambda y, x, seed, rate: seed, nondiff=(2,))
def hash_dropout(x: Array, seed: Array, rate: float) -> Array:
    """Dropout that keeps nothing for the backward pass but its seed."""
    keep = kept(hashed_bits(seed, x.shape), rate)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))


def round_stochastically(x: Array, seed: Array) -> Array:
    """Float32 to bfloat16 by stochastic rounding, which is unbiased.

    The 16 low bits that bfloat16 drops are added to 16 random ones: a carry rounds up. An update
    far smaller than a weight's last bit is then applied with a small probability instead of lost.
    """
    noise = hashed_bits(seed, x.shape) >> 16
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + noise
    high = (bits >> 16).astype(jnp.uint16)
    return jax.lax.bitcast_convert_type(high, jnp.bfloat16)


def _seed(number: Array) -> Array:
    return hashed_bits(jnp.stack([number, number >> 16 >> 16]).astype(jnp.uint32), (2,))


def _split(key: Array, shape: tuple[int, ...]) -> Array:
    return hashed_bits(key + _SPLITTING, (*shape, 2))


def _fold_in(key: Array, number: Array) -> Array:
    folded = key[1] ^ mix(number.astype(jnp.uint32))
    return hashed_bits(jnp.stack([key[0] + _FOLDING, folded]), (2,))


def _random_bits(key: Array, width: int, shape: tuple[int, ...]) -> Array:
    if width == 64:
        high, low = (hashed_bits(k, shape).astype(jnp.uint64) for k in _split(key, (2,)))
        return high << 32 | low
    return (hashed_bits(key, shape) >> (32 - width)).astype(f"uint{width}")


# Added to a key, so that its splits and folds differ from its draws.
_SPLITTING, _FOLDING = np.uint32(0xD1B54A32), np.uint32(0x8CB92BA7)
_HASH = define_prng_impl(
    key_shape=(2,),
    seed=_seed,
    split=_split,
    random_bits=_random_bits,
    fold_in=_fold_in,
    name="gshard_hash",
    tag="gsh",
)
