"""Attention without its scores in memory: a kernel for packed sentences, with dropout.

Scores between all tokens of a row are computed and consumed block by block (FlashAttention), and
recomputed in the backward pass. Blocks in which no query attends to a key are skipped: with several
sentences in a row these are most of them. Dropout's bits are hashed from the index of each score,
so that forward and backward passes draw the same ones.

Queries, keys and values may be parts of one array: the result of one product, whose gradients are
then one product each. The kernels read their parts in place and write the gradients in the same
way, without slicing or concatenation.

The kernels are written in Pallas for Triton. `reference` computes the same from the same bits in
plain JAX: it is the kernels' oracle in the tests, and their replacement without a GPU. A query that
attends to no key gets zeros. Dims as in `gshard.nn.attention`; P parts of an array.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from gshard.nn.hashing import hashed_row_bits, kept
from gshard.nn.kernels.attention import (
    NEVER,
    ROWS,
    Blocks,
    KernelSettings,
    forward_kernel,
    key_kernel,
    query_kernel,
)
from gshard.tensors.annotate import target_platform


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Segments:
    """A compact attention mask: tokens attend to tokens of the same segment.

    Segment 0 is padding, to which nothing attends; packed sequences have 1, 2, ...; with `causal`,
    tokens attend only to earlier ones and themselves.
    """

    queries: Array  # [B, T]
    keys: Array  # [B, L]
    causal: bool = field(default=False, metadata={"static": True})

    def mask(self) -> Array:
        """True at [B, T, L] where a query attends to a key."""
        return segment_mask(self.queries, self.keys, causal=self.causal)


def segment_mask(queries_BT: Array, keys_BL: Array, *, causal: bool = False) -> Array:
    """The mask: tokens attend to the same segment, and with `causal` not to later tokens.

    Segment 0 is padding, to which nothing attends; packed sequences have 1, 2, ...
    """
    mask_BTL = (queries_BT[:, :, None] == keys_BL[:, None, :]) & (keys_BL > 0)[:, None, :]
    if causal:
        steps_T, steps_L = jnp.arange(queries_BT.shape[1]), jnp.arange(keys_BL.shape[1])
        mask_BTL = mask_BTL & (steps_T[:, None] >= steps_L[None, :])
    return mask_BTL


__all__ = ["Blocks", "flash_attention", "joint_attention", "reference", "seed_from_row"]


def flash_attention(
    q_BTND: Array,
    k_BLND: Array,
    v_BLNU: Array,
    segments: Segments,
    rate: float,
    seed: Array,
    blocks: Blocks | None = None,
) -> Array:
    """Softmax of queries times keys, over the root of their dim; dropped out; times values."""
    arrays = tuple(jnp.expand_dims(x, 2) for x in (q_BTND, k_BLND, v_BLNU))
    return joint_attention(arrays, segments, rate, seed, blocks)


def joint_attention(
    arrays_BTPND: tuple[Array, ...],
    segments: Segments,
    rate: float,
    seed: Array,
    blocks: Blocks | None = None,
) -> Array:
    """The same where queries, keys and values are the parts of arrays, in this order.

    An array of three parts, or one of queries and one of keys and values: any grouping of the
    three.
    """
    q, k, v = _parts(arrays_BTPND)
    T, L = q.array.shape[1], k.array.shape[1]
    if blocks is None:
        if target_platform() != "gpu" or not all(_fits(x) for x in arrays_BTPND):
            return reference(q.alone(), k.alone(), v.alone(), segments, rate, seed)
        # The largest that divides a row; of all, if none does.
        own = next((size for size in (64, 32, 16) if math.gcd(T, L) % size == 0), 64)
        blocks = Blocks(own, min(own, 32))
    arrays = tuple(_padded(x, blocks.own) for x in arrays_BTPND)
    q_BT, k_BL = (_padded(x, blocks.own) for x in (segments.queries, segments.keys))
    settings = KernelSettings(rate, segments.causal, q.array.shape[-1] ** -0.5, blocks)
    spans = _spans(q_BT, k_BL, settings)
    return _attend(Operands(arrays, q_BT, k_BL, spans, seed), settings)[:, :T]


class Operands(NamedTuple):
    """What the kernels read: the arrays, the segments of both sides, blocks to visit, a seed."""

    arrays: tuple[Array, ...]
    queries: Array  # [B, T], segments
    keys: Array  # [B, L]
    spans: tuple[Array, Array]  # of blocks of queries, and of blocks of keys
    seed: Array

    def given(self, side: int) -> list[KernelArray]:
        """The first operands of all kernels: an array once for each of its parts."""
        q, k, v = _parts(self.arrays)
        return [
            KernelArray("BTPND", q.array, q.number),
            KernelArray("BLPND", k.array, k.number),
            KernelArray("BLPNU", v.array, v.number),
            KernelArray("BT", self.queries),
            KernelArray("BL", self.keys),
            KernelArray("BXS", self.spans[side]),
            KernelArray("S", self.seed),
        ]


class AttentionInput(NamedTuple):
    """Queries, keys or values: the array that contains them, and their index along its dim P."""

    place: int  # of the array, among all of them
    array: Array
    number: int

    def alone(self) -> Array:
        """The part in an array of its own."""
        return self.array[:, :, self.number]


def _parts(arrays: tuple[Array, ...]) -> tuple[AttentionInput, AttentionInput, AttentionInput]:
    parts = [
        AttentionInput(i, x, number) for i, x in enumerate(arrays) for number in range(x.shape[2])
    ]
    if len(parts) != 3:
        shapes = ", ".join(str(x.shape) for x in arrays)
        raise ValueError(
            f"queries, keys and values are three parts in all, but dim 2 of {shapes} counts "
            f"{len(parts)}"
        )
    q, k, v = parts
    return q, k, v


def reference(
    q_BTND: Array, k_BLND: Array, v_BLNU: Array, segments: Segments, rate: float, seed: Array
) -> Array:
    """The same by einsums, with all scores in memory."""
    mask_BNTL = segments.mask()[:, None]
    scores_BNTL = jnp.einsum("BTND,BLND->BNTL", q_BTND, k_BLND, preferred_element_type=jnp.float32)
    scores_BNTL = scores_BNTL * q_BTND.shape[-1] ** -0.5
    probs_BNTL = jax.nn.softmax(jnp.where(mask_BNTL, scores_BNTL, NEVER))
    probs_BNTL = jnp.where(mask_BNTL, probs_BNTL, 0.0)
    if rate > 0.0:
        keep_BNTL = _reference_keep(probs_BNTL.shape, rate, seed)
        probs_BNTL = jnp.where(keep_BNTL, probs_BNTL / (1.0 - rate), 0.0)
    return jnp.einsum("BNTL,BLNU->BTNU", probs_BNTL.astype(v_BLNU.dtype), v_BLNU)


def seed_from_row(seed: Array, row: Array, heads: int) -> Array:
    """The seed with which rows from `row` on draw the same bits as in the full batch."""
    return jnp.stack([seed[0] + row.astype(jnp.uint32) * np.uint32(heads * ROWS), seed[1]])


def _reference_keep(shape: tuple[int, ...], rate: float, seed: Array) -> Array:
    B, N, T, L = shape
    heads = jnp.arange(B * N, dtype=jnp.uint32).reshape(B, N, 1, 1)
    rows = heads * jnp.uint32(ROWS) + jnp.arange(T, dtype=jnp.uint32)[:, None]
    columns = jnp.arange(L, dtype=jnp.uint32)
    return kept(hashed_row_bits((seed[0], seed[1]), rows, columns), rate)


def _fits(x: Array) -> bool:
    """Whether the hardware supports products of blocks with this many rows."""
    dim = x.shape[-1]
    return 16 <= dim <= 256 and dim & (dim - 1) == 0


def _padded(x: Array, block: int) -> Array:
    """Dim 1 up to a multiple of `block`, by zeros: as segments, these are padding."""
    missing = -x.shape[1] % block
    return x if not missing else jnp.pad(x, ((0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)))


@functools.partial(jax.jit, static_argnums=2)
def _spans(q_BT: Array, k_BL: Array, settings: KernelSettings) -> tuple[Array, Array]:
    """For each block of queries the range of blocks of keys that it attends to.

    And the same for each block of keys; [B, blocks, 2], the end exclusive.
    """
    own, other = settings.blocks.own, settings.blocks.other
    mask_BTL = Segments(q_BT, k_BL, settings.causal).mask()

    def span(mask_BXY: Array) -> Array:
        B, X, Y = mask_BXY.shape
        cut = mask_BXY.reshape(B, X // own, own, Y // other, other)
        any_BXY = jnp.any(cut, axis=(2, 4))
        places_Y = jnp.arange(Y // other)
        first_BX = jnp.min(jnp.where(any_BXY, places_Y, Y // other), axis=2)
        end_BX = jnp.max(jnp.where(any_BXY, places_Y + 1, 0), axis=2)
        return jnp.stack([first_BX, end_BX], axis=2).astype(jnp.int32)

    return span(mask_BTL), span(mask_BTL.swapaxes(1, 2))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attend(operands: Operands, settings: KernelSettings) -> Array:
    return _outputs(operands, settings)[0]


def _forward(operands: Operands, settings: KernelSettings) -> tuple[Array, Any]:
    out, log_z = _outputs(operands, settings)
    return out, (operands, out, log_z)


# Both under `jax.jit`, so that a kernel is traced and lowered once for all layers of a shape.
@functools.partial(jax.jit, static_argnums=1)
def _outputs(operands: Operands, settings: KernelSettings) -> tuple[Array, Array]:
    q, _, v = (part.array for part in _parts(operands.arrays))
    B, T, _, N, _ = q.shape
    out_BTNU = jax.ShapeDtypeStruct((B, T, N, v.shape[-1]), q.dtype)
    out, log_z = _call(
        forward_kernel,
        settings,
        "T",
        operands.given(0),
        [KernelArray("BTNU", out_BTNU), KernelArray("BNT", _per_query(q))],
        "flash_forward",
    )
    return out, log_z


@functools.partial(jax.jit, static_argnums=0)
def _backward(settings: KernelSettings, kept_: Any, grad: Array) -> tuple[Operands]:
    """Gradients in arrays like those given.

    An array with queries and keys is first written by the kernel of the queries' gradients, which
    leaves the other parts, and then by the other kernel.
    """
    operands, out, log_z = kept_
    q, k, _ = _parts(operands.arrays)
    dq, delta = _call(
        query_kernel,
        settings,
        "T",
        [
            *operands.given(0),
            KernelArray("BTNU", grad),
            KernelArray("BNT", log_z),
            KernelArray("BTNU", out),
        ],
        [KernelArray("BTPND", q.array, q.number), KernelArray("BNT", _per_query(q.array))],
        "flash_query_grads",
    )
    given = [
        *operands.given(1),
        KernelArray("BTNU", grad),
        KernelArray("BNT", log_z),
        KernelArray("BNT", delta),
    ]
    begun = [KernelArray("BLPND", dq)] if k.place == q.place else []
    key_grads = _call(
        key_kernel,
        settings,
        "L",
        [*given, *begun],
        [KernelArray("BLPND", x) for x in operands.arrays[k.place :]],
        "flash_key_grads",
        aliases={len(given): 0} if begun else None,
    )
    grads: Any = (*([] if begun else [dq]), *key_grads)
    return (Operands(grads, *[None] * 4),)  # type: ignore[arg-type]  # others: no gradient


_attend.defvjp(_forward, _backward)


def _per_query(q_BTPND: Array) -> jax.ShapeDtypeStruct:
    B, T, _, N, _ = q_BTPND.shape
    return jax.ShapeDtypeStruct((B, N, T), jnp.float32)


class KernelArray(NamedTuple):
    """An array of a kernel, by the names of its dims: T of queries, L of keys.

    X counts blocks of the side that a program has, S is as long as it is. A program sees one part
    of P, or all.
    """

    dims: str
    array: Any
    part: int | None = None

    def spec(self, own: str, block: int) -> pl.BlockSpec:
        """The block of it for the program of block i of dim `own`, head n and row b."""

        def size(dim: str, whole: int) -> int | None:
            if dim in "BNX" or (dim == "P" and self.part is not None):
                return None
            return block if dim == own else whole

        def place(i: Any, n: Any, b: Any) -> tuple[Any, ...]:
            places = {"B": b, "N": n, "X": i, "P": self.part or 0, own: i}
            return tuple(places.get(dim, 0) for dim in self.dims)

        sizes = zip(self.dims, self.array.shape, strict=True)
        return pl.BlockSpec(tuple(size(dim, whole) for dim, whole in sizes), place)


def _call(
    kernel: Any,
    settings: KernelSettings,
    own: str,
    given: list[KernelArray],
    made: list[KernelArray],
    name: str,
    aliases: dict[int, int] | None = None,
) -> Any:
    """Run `kernel` for every block of dim `own` (T or L) of every head of every row."""
    B, T, _, N, _ = given[0].array.shape
    L = given[1].array.shape[1]
    blocks = settings.blocks
    return pl.pallas_call(
        functools.partial(kernel, settings=settings),
        grid=((T if own == "T" else L) // blocks.own, N, B),
        in_specs=[x.spec(own, blocks.own) for x in given],
        out_specs=[x.spec(own, blocks.own) for x in made],
        out_shape=[jax.ShapeDtypeStruct(x.array.shape, x.array.dtype) for x in made],
        input_output_aliases=aliases or {},
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        cost_estimate=_cost(name, given),
        interpret=blocks.interpret,
        name=name,
    )(*(x.array for x in given))


# For each kernel the products of queries, keys and values with each other, and how many arrays of
# one part (queries, keys, values, results, or gradients of these) it reads and writes.
_WORK = {"flash_forward": (2, 4), "flash_query_grads": (3, 6), "flash_key_grads": (4, 6)}


def _cost(name: str, given: list[KernelArray]) -> pl.CostEstimate:
    """The cost of a kernel if every query attends to every key; skipped blocks depend on data."""
    (B, T, _, N, D), L = given[0].array.shape, given[1].array.shape[1]
    products, arrays = _WORK[name]
    itemsize = given[0].array.dtype.itemsize
    return pl.CostEstimate(
        flops=2 * products * B * N * T * L * D,
        transcendentals=B * N * T * L,
        bytes_accessed=arrays * B * N * D * (T + L) // 2 * itemsize,
    )
