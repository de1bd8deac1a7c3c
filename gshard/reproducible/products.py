"""Products whose bits do not depend on how many rows and columns a device has.

A product is a chain of multiply-adds along the contracted rows, in the order of rows. Libraries
have other kernels for a few rows or columns, which add in another order. Which sizes share a kernel
depends on the library and on the processor: it is measured, once in a process, on CPUs and GPUs.
Where no sizes do, the chain is written out as a loop.

What a compiler must not rewrite is pinned (see `reproducible.pins`): it knows nothing of it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.tensors.devices import Place

# A GPU's kernels must not be chosen by trying which is fastest: that depends on sizes, and on the
# day. Atomic additions have no order.
COMPILER_OPTIONS = {
    "xla_allow_excess_precision": False,
    "xla_gpu_autotune_level": 0,
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_deterministic_ops": True,
}
MULTIPLES = (8, 16, 24, 48, 64)  # of rows and columns, to which results may be padded
CHAIN = 256  # the longest sum of products that no library cuts
_BLOCKS = ((1, 1), (1, 2), (2, 1), (3, 1), (1, 3), (3, 5), (5, 3), (4, 4), (1, 9), (9, 1))
_GPU_MULTIPLES = (64, 128)
_LARGE_BLOCKS = ((1, 32), (32, 1), (32, 32))  # tried on GPUs, where they cost nothing


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
    assert place.opaque is not None
    ones = place.opaque.astype(unsigned)
    if size == 64:
        ones = lax.shift_left(ones, jnp.asarray(32, unsigned)) | ones
    bits = lax.bitcast_convert_type(x, unsigned) & ones
    if other is not None:
        bits |= lax.bitcast_convert_type(other, unsigned) & ~ones
    return lax.bitcast_convert_type(bits, x.dtype)


def chained_product(place: Place, x: jax.Array, y: jax.Array) -> jax.Array:
    """x[b, m, k] @ y[b, k, n], by chains along k."""
    multiple = shared_multiple()
    if not multiple:
        return _written_out(place, x, y)
    m, n = x.shape[1], y.shape[2]
    zero = jnp.zeros((), x.dtype)
    x = lax.pad(x, zero, ((0, 0, 0), (0, -m % multiple, 0), (0, 0, 0)))
    y = lax.pad(y, zero, ((0, 0, 0), (0, 0, 0), (0, -n % multiple, 0)))
    total = None
    for start in range(0, x.shape[2], CHAIN):
        limit = min(start + CHAIN, x.shape[2])
        part = _product(
            lax.slice_in_dim(x, start, limit, axis=2), lax.slice_in_dim(y, start, limit, axis=1)
        )
        part = pinned(place, part)  # XLA makes a multiplication of a product of one row
        total = part if total is None else lax.add(total, part)
    assert total is not None
    return lax.slice(total, (0, 0, 0), (x.shape[0], m, n))


def _product(x: Any, y: Any) -> jax.Array:
    numbers = (((2,), (1,)), ((0,), (0,)))
    return lax.dot_general(x, y, numbers, precision=lax.Precision.HIGHEST)


def _written_out(place: Place, x: jax.Array, y: jax.Array) -> jax.Array:
    """The chains as a loop over the contracted rows; every operation rounds by itself."""

    def add(total: jax.Array, rows: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        column, row = rows
        part = lax.mul(*jnp.broadcast_arrays(column[:, :, None], row[:, None, :]))
        return lax.add(total, pinned(place, part)), None

    nothing = jnp.zeros((x.shape[0], x.shape[1], y.shape[2]), x.dtype)
    rows = lax.transpose(x, (2, 0, 1)), lax.transpose(y, (1, 0, 2))
    return lax.scan(add, nothing, rows)[0]


@functools.cache
def shared_multiple() -> int:
    """The least multiple of rows and columns at which all products share a kernel; 0: none.

    On a TPU, which has one unit for products of all sizes, the smallest is assumed.
    """
    if jax.default_backend() == "tpu":
        return MULTIPLES[0]
    with jax.ensure_compile_time_eval(), jax.default_device(jax.local_devices()[0]):
        return next((multiple for multiple in multiples() if have_one_kernel(multiple)), 0)


def multiples() -> tuple[int, ...]:
    """The multiples that are tried on this hardware."""
    return MULTIPLES if jax.default_backend() == "cpu" else _GPU_MULTIPLES


def have_one_kernel(multiple: int) -> bool:
    """Whether products of some rows and columns have the bits of those rows of a larger product."""
    blocks = _BLOCKS if jax.default_backend() == "cpu" else (*_BLOCKS, *_LARGE_BLOCKS)
    rng = np.random.default_rng(0)
    most = multiple * max(max(block) for block in blocks)
    for b, k in ((1, 24), (3, 41), (1, CHAIN)):
        x = rng.normal(size=(b, most, k)).astype(np.float32)
        y = rng.normal(size=(b, k, most)).astype(np.float32)
        sizes = [(multiple * rows, multiple * columns) for rows, columns in blocks]
        pairs = [(x[:, -m:].copy(), y[:, :, -n:].copy()) for m, n in (*sizes, (most, most))]
        *parts, largest = map(np.asarray, _products(pairs))
        for (m, n), part in zip(sizes, parts, strict=True):
            if part.tobytes() != largest[:, -m:, -n:].tobytes():
                return False
    return True


@functools.partial(jax.jit, compiler_options=COMPILER_OPTIONS)
def _products(pairs: list[tuple[Any, Any]]) -> list[jax.Array]:
    return [_product(x, y) for x, y in pairs]
