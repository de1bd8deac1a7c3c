"""Values that a compiler knows nothing about (see `capture.simplify.pins`)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from gshard.tensors.devices import Place

OPAQUE = "opaque"  # in `Place.known`: 32 bits that are all set, which the compiler cannot know; the
# first argument of a reproducible program


def pinned(place: Place, x: jax.Array, other: jax.Array | None = None) -> jax.Array:
    """`x`, and nothing that a compiler could know of how it was made.

    With another array of the same type, the result seems to depend on each element of that, too:
    the compiler cannot know that `x` is broadcast.
    """
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        others = (None, None) if other is None else (lax.real(other), lax.imag(other))
        parts = zip((lax.real(x), lax.imag(x)), others, strict=True)
        return lax.complex(*(pinned(place, part, part_of_other) for part, part_of_other in parts))
    size = x.dtype.itemsize * 8
    unsigned = jnp.dtype(f"uint{size}")
    ones = place.known[OPAQUE].astype(unsigned)
    if size == 64:
        ones = lax.shift_left(ones, jnp.asarray(32, unsigned)) | ones
    bits = lax.bitcast_convert_type(x, unsigned) & ones
    if other is not None:
        bits |= lax.bitcast_convert_type(other, unsigned) & ~ones
    return lax.bitcast_convert_type(bits, x.dtype)
